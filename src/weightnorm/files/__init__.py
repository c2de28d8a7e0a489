"""Inspect and convert checkpoint files: what ``weightnorm inspect`` and ``convert`` do.

Reads and writes .safetensors, whole or in shards with an index, and torch's .pt, .pth, .bin and
.ckpt. Needs safetensors, which ``pip install 'weightnorm[files]'`` installs. Files are not trusted:

- Nothing in a file is executed: pickles are loaded with ``weights_only=True``.
- Sizes are checked against the file before memory is used for them.
- Whatever is wrong with a file, a FileError names it, with control characters escaped.

The output appears whole or not at all, and the input is never written to.
"""
