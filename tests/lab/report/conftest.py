"""Records of runs, written without training, and one report on them for the whole session."""

import math
from pathlib import Path

import pytest

from weightnorm.lab.records import RunRecord, append_row, load_record, write_json
from weightnorm.lab.report import write_report

CONFIG = {
    "preset": "cpu",
    "parameterization": "weight-norm",
    "learning_rate": 0.003,
    "seed": 1,
    "data": "cifar10",
    "epochs": 4,
    "width": 0.25,
    "limit": None,
}
SESSION = {
    "commit": "0123456789ab",
    "torch": "2.6.0",
    "python": "3.11.7",
    "machine": "A machine",
    "device": "cpu",
    "threads": 2,
    "ranks": 1,
}
ENDS = {
    "standard": 0.50,
    "batch-norm": 0.30,
    "weight-norm": 0.28,
    "mean-only-batch-norm": 0.34,
    "weight-norm-mean-only": 0.22,
}


def write_run(
    root: Path,
    *,
    experiment: str = "classify",
    label: str | None = None,
    end: float | None = 0.3,
    done: int | None = None,
    session: dict | None = None,
    result: dict | None = None,
    metrics: list[dict] | None = None,
    **config,
) -> RunRecord:
    """A run whose training error falls to `end`; `done` epochs of it if it is not finished."""
    config = CONFIG | config
    folder = root / experiment / (label or config["preset"]) / str(config["parameterization"])
    folder /= f"lr-{config['learning_rate']}/seed-{config['seed']}"
    folder.mkdir(parents=True)
    head = {"experiment": experiment, "preset": config["preset"], "config": config}
    write_json(folder / "config.json", head)
    append_row(folder / "sessions.jsonl", SESSION | (session or {}))
    count = config["epochs"] if done is None else done
    for row in [_row(n, config, end) for n in range(1, count + 1)] if metrics is None else metrics:
        append_row(folder / "metrics.jsonl", row)
    if done is None:
        last = {"train_error": end, "test_error": end and end / 2, "seconds": 8.0}
        write_json(folder / "result.json", last if result is None else result)
    return load_record(folder)


def _row(epoch: int, config: dict, end: float | None) -> dict:
    share = (epoch - 1) / max(config["epochs"] - 1, 1)
    error = None if end is None else end + (0.9 - end) * (1 - share) ** 2
    row = {"epoch": epoch, "train_error": error, "seconds": 2.0}
    row["learning_rate"] = 1.0 if share <= 0.5 else 0.5
    row["test_error"] = error and error / 2
    if str(config["parameterization"]).startswith("weight-norm"):
        row |= {"v_norm": 1 + share, "effective_step": 2 / (1 + share)}
    return row


@pytest.fixture
def run(tmp_path):
    """`run(**changes)`: a run below tmp_path/runs, and its record."""
    return lambda **changes: write_run(tmp_path / "runs", **changes)


@pytest.fixture(scope="session")
def example(tmp_path_factory):
    """Two rates and two seeds of five methods; a run that is not finished, one that diverged, two
    other settings; a record of an unknown experiment, a damaged one, and a copy."""
    root = tmp_path_factory.mktemp("example") / "runs"
    for i, (kind, end) in enumerate(ENDS.items()):
        for rate in (0.001, 0.003):
            for seed in (1, 2):
                last = end + 0.01 * (1 + i / 100) * seed + 0.1 * abs(math.log10(rate / 0.003))
                write_run(root, parameterization=kind, learning_rate=rate, seed=seed, end=last)
    write_run(root, seed=9, done=2)
    diverged = {"train_error": None, "diverged": {"epoch": 3, "step": 5, "message": "nan"}}
    write_run(root, learning_rate=0.1, seed=1, result=diverged)
    write_run(root, label="cpu+epochs=3", epochs=3, parameterization="standard")
    write_run(root, preset="demo", data="digits", parameterization="standard")
    write_run(root, experiment="other")
    write_run(root.parent / "elsewhere", seed=2).folder.parents[3].rename(root / "copy")
    damaged = root / "classify" / "cpu" / "standard" / "lr-0.1" / "seed-1"
    damaged.mkdir(parents=True)
    (damaged / "config.json").write_text('{"experiment": "cla')
    return root


@pytest.fixture(scope="session")
def files(example, tmp_path_factory):
    """The report on `example`."""
    return write_report(example, tmp_path_factory.mktemp("out"))
