"""The verbs of the command line: help, lists, the demo."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import weightnorm
from weightnorm import Parameterization
from weightnorm.lab import classify
from weightnorm.lab.cli import experiments
from weightnorm.lab.cli.arguments import refuse_singular, with_flags
from weightnorm.lab.cli.experiments import parse_config
from weightnorm.lab.cli.main import main
from weightnorm.lab.cli.sweep import SweepOptions
from weightnorm.lab.cli.verbs import VERBS
from weightnorm.lab.errors import UsageError
from weightnorm.lab.records import RunRecord
from weightnorm.lab.sweeps.summary import SweepResult, render

COLUMNS = 80


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def test_overview_lists_every_verb_in_80_columns(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= COLUMNS
    assert all(f"  weightnorm {name} " in out for name in VERBS)


def test_version_is_the_librarys(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"weightnorm {weightnorm.__version__}\n"


def test_list_fits_80_columns_and_names_only_presets_that_run(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= COLUMNS
    module, seen = None, 0
    for line in out.splitlines():
        if (name := line.partition(":")[0]) in experiments.EXPERIMENTS:
            module = experiments.EXPERIMENTS[name]
        elif flags := re.match(r"  (--preset \S+(?: --data \S+)?)", line):
            config = experiments.parse_config(module, flags[1].split(), f"run {module.NAME}")
            assert f"--preset {config.preset}" in flags[1]
            seen += 1
    assert seen == sum(len(module.PRESETS) for module in experiments.EXPERIMENTS.values())


def test_data_fits_80_columns(tmp_path, capsys):
    assert main(["data", "--data-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "binarized_mnist_train.amat" in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= COLUMNS


@pytest.mark.parametrize("words", [["nonsense"], ["run", "clasify"], ["run"]])
def test_usage_errors_have_exit_code_2(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_report_without_runs_fails_with_exit_code_1(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "no runs to report on" in capsys.readouterr().err


def test_sweep_table_fits_80_columns_without_cutting_names():
    names = [str(kind) for kind in Parameterization]
    result = {"train_error": 0.047781, "test_error": 0.025123, "test_loss": 0.102123}
    records = [
        RunRecord(
            Path(name),
            "classify",
            "demo",
            {"parameterization": name, "learning_rate": 0.003, "seed": seed},
            result=result | {"seconds": 1.0},
        )
        for name in names
        for seed in (1, 2)
    ]
    console = Console(file=io.StringIO(), width=COLUMNS)
    console.print(render(SweepResult(records, metric="train_error")))
    out = console.file.getvalue()
    assert all(name in out for name in [*names, "parameterization"])
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= COLUMNS


@pytest.mark.parametrize("flag", ["--learning_rate", "--learning-rate"])
def test_flags_may_have_underscores(flag):
    config = parse_config(classify, ["--preset", "demo", flag, "0.01"], "run classify")
    assert config.learning_rate == 0.01
    config = parse_config(classify, ["--preset", "demo", f"{flag}=0.02"], "run classify")
    assert config.learning_rate == 0.02
    with pytest.raises(UsageError, match="a grid takes --learning-rates"):
        refuse_singular([flag, "0.01"], with_flags(SweepOptions, ["learning_rates"], "Rates."))
