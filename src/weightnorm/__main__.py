"""``python -m weightnorm``: the command line."""

import os
import sys

from weightnorm.lab.cli.main import main as run
from weightnorm.lab.errors import Interrupted


def main() -> int:
    for stream in (sys.stdout, sys.stderr):  # a terminal without Unicode must not stop a command
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    code = run(sys.argv[1:])
    if code == Interrupted.exit_code:
        # Leave at once: CPython exits by a signal, not with this code, if the KeyboardInterrupt was
        # raised inside an `exec`, as imports of generated code use it, although it was handled.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
