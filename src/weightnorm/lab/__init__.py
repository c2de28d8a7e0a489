"""The lab: the experiments of the paper, each one command. Needs the extra `lab`.

`checkpoint_files` and its two verbs need the smaller extra `files`.
"""
