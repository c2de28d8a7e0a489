"""Records of runs, written without training."""

import math
from pathlib import Path

import pytest

from weightnorm.lab.records import RunRecord, append_row, load_record, write_json
from weightnorm.lab.reports import report

CONFIG = {
    "preset": "cpu",
    "parameterization": "weight-norm",
    "learning_rate": 0.003,
    "seed": 1,
    "data": "cifar10",
    "epochs": 4,
    "batch_size": 100,
    "width": 0.25,
    "limit": None,
}
SESSION = {
    "started": "2026-01-01T00:00:00+00:00",
    "commit": "0123456789ab",
    "weightnorm": "0.1.0",
    "torch": "2.6.0",
    "python": "3.11.7",
    "machine": "A machine",
    "device": "cpu",
    "threads": 2,
    "ranks": 1,
    "epoch": 0,
}
KINDS = {
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
    seconds: float = 2.0,
    session: dict | None = None,
    result: dict | None = None,
    metrics: list[dict] | None = None,
    **config,
) -> RunRecord:
    """A run whose training error falls to `end`; `done` epochs of it if it is not finished."""
    config = CONFIG | config
    folder = root / experiment / (label or config["preset"])
    folder /= str(config["parameterization"])
    folder /= f"lr-{config['learning_rate']:g}/seed-{config['seed']}"
    folder.mkdir(parents=True)
    head = {"experiment": experiment, "preset": config["preset"], "config": config}
    write_json(folder / "config.json", head)
    append_row(folder / "sessions.jsonl", SESSION | (session or {}))
    count = config["epochs"] if done is None else done
    rows = metrics
    if rows is None:
        rows = [_row(epoch, config, end, seconds) for epoch in range(1, count + 1)]
    for row in rows:
        append_row(folder / "metrics.jsonl", row)
    if done is None:
        last = {"train_error": end, "test_error": end and end / 2, "test_loss": 1.0, "seconds": 8.0}
        write_json(folder / "result.json", last if result is None else result)
    return load_record(folder)


def _row(epoch: int, config: dict, end: float | None, seconds: float) -> dict:
    left = 0.9 - 0.25 * math.log(config["epochs"]) / 4
    share = (epoch - 1) / max(config["epochs"] - 1, 1)
    error = None if end is None else end + (left - end) * (1 - share) ** 2
    row = {
        "epoch": epoch,
        "train_loss": error and 3 * error,
        "train_error": error,
        "test_loss": error,
        "test_error": error and error / 2,
        "learning_rate": config["learning_rate"],
        "seconds": seconds,
    }
    if str(config["parameterization"]).startswith("weight-norm"):
        row |= {"v_norm": 1 + share, "effective_step": 2 / (1 + share)}
    return row


def write_grid(root: Path, *, rates=(0.003,), seeds=(1, 2, 3), **config) -> list[RunRecord]:
    """The five parameterizations at each rate and seed."""
    return [
        write_run(
            root,
            parameterization=kind,
            learning_rate=rate,
            seed=seed,
            end=min(0.9, error + 0.01 * seed + 0.1 * abs(math.log10(rate / 0.003)) ** 2),
            **config,
        )
        for kind, error in KINDS.items()
        for rate in rates
        for seed in seeds
    ]


@pytest.fixture
def run(tmp_path):
    """`run(**changes)`: a run below tmp_path/runs, and its record."""
    return lambda **changes: write_run(tmp_path / "runs", **changes)


@pytest.fixture
def grid(tmp_path):
    """`grid(rates=…, seeds=…)`: five parameterizations below tmp_path/runs, and their records."""
    return lambda **changes: write_grid(tmp_path / "runs", **changes)


@pytest.fixture(scope="session")
def example(tmp_path_factory):
    """A folder with a sweep, an unfinished run, an unknown experiment and a damaged record."""
    root = tmp_path_factory.mktemp("example") / "runs"
    write_grid(root, rates=(0.001, 0.003))
    write_run(root, seed=9, done=2)
    write_run(root, label="cpu+epochs=3", epochs=3, parameterization="standard")
    write_run(root, preset="demo", data="digits", parameterization="standard")
    rows = [{"epoch": epoch, "bound": -90.0 + epoch} for epoch in (1, 2)]
    write_run(root, experiment="other", metrics=rows, result={"bound": -88.0})
    damaged = root / "classify" / "cpu" / "standard" / "lr-0.1" / "seed-1"
    damaged.mkdir(parents=True)
    (damaged / "config.json").write_text('{"experiment": "cla')
    return root


@pytest.fixture(scope="session")
def files(example, tmp_path_factory):
    """The report on `example`."""
    return report(example, tmp_path_factory.mktemp("out"))
