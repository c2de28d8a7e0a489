"""`weightnorm run`: run one experiment."""

from __future__ import annotations

import os

from weightnorm.lab.cli.console import ERR, OUT, print_line
from weightnorm.lab.cli.experiments import parse_config, split_experiment
from weightnorm.lab.records import is_number


def main(words: list[str]) -> int:
    module, words = split_experiment(words, "run")
    record = module.run(parse_config(module, words, f"run {module.NAME}"), ERR)
    if os.environ.get("RANK", "0") == "0":  # under torchrun, only the first rank prints
        numbers = [
            f"{k.replace('_', ' ')} {v:.4g}"
            for k, v in (record.result or {}).items()
            if is_number(v)
        ]
        print_line(OUT, f"{record.folder}: {', '.join(numbers)}")
    return 0
