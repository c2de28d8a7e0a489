"""``python -m weightnorm``: the command line."""

import sys

from weightnorm.lab.cli import main as run


def main() -> int:
    for stream in (sys.stdout, sys.stderr):  # a terminal without Unicode must not stop a command
        getattr(stream, "reconfigure", lambda **_: None)(errors="backslashreplace")
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
