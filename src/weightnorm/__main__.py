"""``python -m weightnorm``: the lab's command line."""

import sys


def main() -> int:
    try:
        from weightnorm.lab.cli.main import main as lab
    except ModuleNotFoundError as error:
        print(
            f"the command line needs the lab, and {error.name} is missing: "
            "pip install 'weightnorm[lab]'",
            file=sys.stderr,
        )
        return 1
    return lab(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
