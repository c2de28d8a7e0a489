"""The command line: imports the module of a verb, runs it, and turns errors into exit codes.

Exit codes: 0 done, 1 failed, 2 usage, 3 slower than before (bench --compare), 130 interrupted.
A `run` that diverged has failed, also when the command is repeated; a `sweep` with diverged runs
has not.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from weightnorm import __version__, _exit_on_interrupt
from weightnorm.files.errors import FileError, printable
from weightnorm.lab.cli.verbs import VERBS
from weightnorm.lab.errors import Interrupted, LabError, nearest


def main(words: Sequence[str]) -> int:
    """Run a command; returns its exit code."""
    words = list(words)
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            print(_overview())
            return 0
        if words[0] == "--version":
            print(f"weightnorm {__version__}")
            return 0
        return _run(nearest(words[0], VERBS, "command"), words[1:])
    except Interrupted as stopped:
        _print_error(f"stopped; everything is saved in {stopped}")
        _print_error(f"to resume:  {shlex.join(['weightnorm', *words])}")
        return stopped.exit_code
    except FileError as error:
        _print_error(f"failed: {error}")
        return 1
    except LabError as error:
        _print_error(f"{'error' if error.exit_code == 2 else 'failed'}: {error}")
        return error.exit_code
    except BrokenPipeError:  # standard output was closed, as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a folder that cannot be made, a full disk
        _print_error(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        return Interrupted.exit_code


def _run(name: str, words: list[str]) -> int:
    verb = VERBS[name]
    try:
        module = import_module(verb.module)
        if signal.getsignal(signal.SIGINT) is _exit_on_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code: int = module.main(words)
    except ModuleNotFoundError as error:
        if (error.name or "weightnorm").partition(".")[0] == "weightnorm":
            raise
        raise LabError(
            f"weightnorm {name} needs the package {error.name}, which is not installed: "
            f"pip install 'weightnorm[{verb.extra}]'"
        ) from error
    return code


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = [f"  weightnorm {name:{width}}  {verb.summary}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "Experiments of the weight normalization paper, and checkpoint tools.\n",
            *lines,
            "\nEach has a --help. Start with: weightnorm demo",
        ]
    )


def _print_error(text: str) -> None:
    print(printable(text, keep="\n"), file=sys.stderr)
