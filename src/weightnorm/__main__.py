"""``python -m weightnorm``: the command line."""

import sys

from weightnorm.lab.cli.main import main as run


def main() -> int:
    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
