"""The command line: help, lists, errors, status; no input leads to a traceback."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import weightnorm
from commands import HANGS, environment, started
from commands import weightnorm as command
from files.checkpoint_files import SHARDED, save, state_of
from weightnorm.lab import classify
from weightnorm.lab import sweep as sweeps
from weightnorm.lab.cli import COMMANDS, EXPERIMENTS, experiment, main, parse_config
from weightnorm.lab.config import scientific_fields
from weightnorm.lab.files import lock_folder
from weightnorm.lab.records import RunRecord, append_row, write_json

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
MODULES = [experiment(name) for name in EXPERIMENTS]
SWEEP = ("sweep", "classify", "--preset", "demo")
COLUMNS = 80


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(COLUMNS))


def widest(text, but="\0"):
    """Return the length of the longest line, apart from lines with `but` in them."""
    return max(len(line) for line in text.splitlines() if but not in line)


def exit_code(words):
    try:
        return main(words)
    except SystemExit as stop:  # raised by tyro
        return stop.code


# — help and lists —


def test_overview_lists_the_commands(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert widest(out) <= COLUMNS
    shown = {name for name in COMMANDS if f"  weightnorm {name} " in out}
    assert shown == {*COMMANDS} - {"tables"}
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"weightnorm {weightnorm.__version__}\n"


@pytest.mark.parametrize("words", [*COMMANDS, "sweep dqn", *(f"run {x}" for x in EXPERIMENTS)])
def test_help_of_every_command(words, capsys):
    assert exit_code([*words.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert f"usage: weightnorm {words}" in out
    assert widest(out, but="usage: ") <= COLUMNS


def test_list_names_only_presets_that_run(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert widest(out) <= COLUMNS
    found, module = [], None
    for line in out.splitlines():
        if (name := line.partition(":")[0]) in EXPERIMENTS:
            module = experiment(name)
        elif flags := re.match(r"  (--preset \S+(?: --data \S+)?)", line):
            config = parse_config(module, flags[1].split(), f"run {module.NAME}")
            assert f"--preset {config.preset}" in flags[1]
            found.append(config)
    assert found == [preset for module in MODULES for preset in module.PRESETS.values()]


def test_lists_of_claims_benchmarks_and_data(tmp_path, capsys):
    for words in (["claims", "--list"], ["bench", "--list"], ["data", "--data-dir", str(tmp_path)]):
        assert main(words) == 0
    out = capsys.readouterr().out
    assert widest(out, but=str(tmp_path)) <= COLUMNS
    for text in ("17  ", "optimizer  ", "binarized_mnist_train.amat  missing"):
        assert text in out


# — options —


def test_flags_may_have_underscores_and_equal_signs():
    for words in (["--learning_rate", "0.01"], ["--learning_rate=0.01"]):
        config = parse_config(classify, [*words, "--preset=demo"], "run")
        assert (config.learning_rate, config.preset) == (0.01, "demo")


USAGE_ERRORS = [
    (["rnu"], "did you mean 'run'?"),
    (["run"], "which experiment?"),
    (["run", "clasify"], "did you mean 'classify'?"),
    (["run", "classify", "--preset", "demmo"], "Expected one of ('paper', 'cpu', 'demo')"),
    (["run", "classify", "--epochs", "0"], "epochs is 0; expected"),
    (["run", "classify", "--learning-rate", "inf"], "learning-rate is inf; expected"),
    (["run", "classify", "--lerning-rate", "1"], "--learning-rate"),
    (["run", "classify", "--device", "cuda:77"], "device is cuda:77; expected a device of"),
    (["run", "vae", "--parameterization", "batch-norm"], "parameterization is batch-norm"),
    ([*SWEEP, "--seed", "2"], "a grid takes --seeds"),
    ([*SWEEP, "--learning_rate=0.1"], "a grid takes --learning-rates"),
    ([*SWEEP, "--seeds", "1", "1"], "give each value once"),
    ([*SWEEP, "--seeds", "-1"], "seed is -1; expected"),
    ([*SWEEP, "--jobs", "0"], "jobs is 0; expected 1 or more"),
    ([*SWEEP, "--metric", "tets_error"], "metric is tets_error; expected one of train_error"),
    ([*SWEEP, "--parameterizations", "batchnorm"], "batch-norm"),
    ([*SWEEP, "--device", "nonsense"], "device is nonsense; expected a device of this machi"),
    (["sweep", "vae", "--parameterizations", "batch-norm"], "expected one or more of standard"),
    (["data", "--download", "cifar"], "did you mean 'cifar10'?"),
    (["convert", "a.pt", "b.pt", "--to", "hok"], "Expected one of ('parametrize', 'hook'"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), USAGE_ERRORS)
def test_usage_errors(words, message, tmp_path, monkeypatch, capsys):
    """Exit code 2 before anything is written, with the valid values in the message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    assert exit_code(words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("run", "classify", "--preset", "demo", "--out", "{file}/runs"),
        ("sweep", "classify", "--preset", "demo", "--out", "{file}/runs", "--seeds", "1"),
        ("report", "{folder}", "--out", "{file}/report"),
        ("inspect", "{folder}/none.pt"),
    ],
    ids=lambda words: words[0],
)
def test_failures_have_exit_code_1(words, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    words = [word.format(file=tmp_path / "file", folder=tmp_path) for word in words]
    assert main(words) == 1
    assert "failed" in capsys.readouterr().err


# — runs —


def test_dry_run_prints_the_commands_that_are_left(tmp_path, capsys):
    words = [*SWEEP, "--out", str(tmp_path), "--parameterizations", "standard", "weight-norm"]
    assert main([*words, "--seeds", "1", "2", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert not list(tmp_path.iterdir())
    for line in lines:
        program, verb, name, *flags = line.split()
        assert (program, verb, name) == ("weightnorm", "run", "classify")
        config = parse_config(classify, flags, "run classify")
        head = {"experiment": name, "preset": "demo", "config": scientific_fields(config)}
        (job,) = (job for job in plan(tmp_path) if job.config == config)
        if config.seed == 1:
            write_json(job.folder / "config.json", head)
            write_json(job.folder / "result.json", {"train_error": 0.5})
    assert main([*words, "--seeds", "1", "2", "--dry-run"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == lines[2:]
    assert captured.err == "4 runs, 2 of them finished\n"


def plan(runs):
    jobs = sweeps.Grid("classify", classify.PRESETS["demo"], seeds=(1, 2)).plan()
    for job in jobs:
        (runs / job.folder.relative_to("runs")).mkdir(parents=True, exist_ok=True)
    base = classify.PRESETS["demo"]
    return sweeps.Grid("classify", type(base)(**{**vars(base), "out": runs}), seeds=(1, 2)).plan()


def test_status(tmp_path, capsys):
    states = ("finished", "diverged", "running", "stopped")
    for seed, state in enumerate(states):
        folder = tmp_path / "classify/cpu/standard/lr-0.1" / f"seed-{seed}"
        folder.mkdir(parents=True)
        config = {"epochs": 30, "seed": seed}
        head = {"experiment": "classify", "preset": "demo", "config": config}
        write_json(folder / "config.json", head)
        append_row(folder / "metrics.jsonl", {"epoch": 1, "train_loss": 2.0, "train_error": 0.25})
        if state in ("finished", "diverged"):
            diverged = {"diverged": {"message": "x"}} if state == "diverged" else {}
            write_json(folder / "result.json", {"train_error": 0.125, **diverged})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    (tmp_path / "classify/cpu/standard/lr-0.1/seed-3/lock").touch()
    (tmp_path / "bench").mkdir()
    write_json(tmp_path / "bench/config.json", {**head, "experiment": "bench", "config": {}})
    with lock_folder(tmp_path / "classify/cpu/standard/lr-0.1/seed-2"):
        assert main(["status", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[:7] == [
        ".",
        f"  {'bench':20} stopped     0/–",
        "classify/cpu/standard",
        "  lr-0.1/seed-0        finished   1/30  train error 0.125",
        "  lr-0.1/seed-1        diverged   1/30  train error 0.125",
        "  lr-0.1/seed-2        running    1/30  train error 0.25",
        "  lr-0.1/seed-3        stopped    1/30  train error 0.25",
    ]
    assert "damaged/config.json is damaged" in out
    assert main(["status", str(tmp_path / "none")]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_closed_standard_output_is_no_traceback():
    close = ("bash", "-c", '"$@" | true; exit ${PIPESTATUS[0]}', "closed")
    _, _, err = command("run", "classify", "--help", prefix=close)
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_ctrl_c_before_there_is_anything_to_save(tmp_path):
    """Without a traceback once the command line is imported."""
    process = started("run", "classify", "--preset", "demo", "--out", tmp_path)
    while process.poll() is None and not [*tmp_path.rglob("config.json")]:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode in (130, -signal.SIGINT), err
    assert "Traceback" not in out + err


# — checkpoint files —


def test_inspect_prints_a_weight_to_a_line(tmp_path, capsys):
    long = ".".join(["decoder.blocks.17.convolution_of_the_residual_branch"] * 2) + ".weight"
    parts = {f"{long}_g": torch.ones(1024, 1, 1), f"{long}_v": torch.ones(1024, 512, 7)}
    state = {**state_of("hook"), **parts, "\x1b[2J\r\n_g": torch.ones(4, 1)}
    state["\x1b[2J\r\n_v"] = torch.zeros(4, 3)
    assert main(["inspect", str(save(state, tmp_path / "m.safetensors"))]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["shape", "dim", "mean", "‖v‖", "mean", "|g|", "dead", "weight"]
    assert last == "5 normalized weights (5 hook), 3 other tensors"
    rows = {row.split()[-1]: row for row in rows}
    assert set(rows) == {"0.weight", "1.weight", "2.weight", long, r"\x1b[2J\r\n"}
    assert rows[long].split() == ["1024×512×7", "0", "59.87", "1", long]
    assert rows[r"\x1b[2J\r\n"].split()[:5] == ["4×3", "0", "0", "1", "4"]
    assert all(len(row) <= COLUMNS for name, row in rows.items() if name != long)


def test_convert_names_paths_and_what_it_leaves_alone(tmp_path, capsys):
    source, target = tmp_path / "old.pt", tmp_path / "new.pt"
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}}
    torch.save({"generator": state_of("hook"), "optim_g": optimizer}, source)
    assert main(["convert", str(source), str(target), "--to", "parametrize"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"read:    {source}",
        f"written: {target}",
        "3 normalized weights, written as parametrize",
        "left as it was: optim_g (1 tensor, none of a normalized weight)",
    ]
    assert main(["inspect", str(target)]) == 0
    assert "3 normalized weights (3 parametrize), 4 other tensors" in capsys.readouterr().out


# — what has to be installed —

NOT_FOR_FILES = ["sklearn", "matplotlib", "ale_py", "gymnasium", "jinja2", "pooch",
                 "PIL", "pandas", "scipy"]  # fmt: skip
NOT_ON_WINDOWS = ["fcntl", "resource", "termios", "pwd", "grp"]
BLOCKED = """
import contextlib, io, json, os, signal, sys
blocked, commands = map(json.loads, sys.argv[1:])
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import torch
for name in set(blocked) & set(sys.modules):
    del sys.modules[name]
if "fcntl" in blocked:
    for name in ("posix_fallocate", "sched_getaffinity", "fork", "killpg"):
        delattr(os, name)
    del signal.SIGKILL, signal.pthread_sigmask
sys.meta_path.insert(0, Refuse())
from weightnorm.lab.cli import main
results = []
for words in commands:
    with contextlib.redirect_stdout(io.StringIO()) as out, \\
         contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    results.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(results))
"""


def run_without(modules, commands):
    """Run commands in a process that cannot import the modules: (code, output, errors) of each."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BLOCKED, json.dumps(modules), json.dumps(commands)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_files_need_only_their_extra_and_no_posix(tmp_path):
    commands = []
    for name in ("model.pt", "model.safetensors", SHARDED):
        source, out = str(save(state_of("hook"), tmp_path / name)), str(tmp_path / "out" / name)
        commands += [["convert", source, out, "--to", "folded"], ["inspect", source]]
    for code, out, err in run_without([*NOT_FOR_FILES, *NOT_ON_WINDOWS], commands):
        assert code == 0, err
        assert "3 normalized weights" in out


def test_without_extras_help_works_and_commands_name_their_extra():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras["files"]) == {"safetensors", "numpy", "rich", "tyro"}
    (code, overview, _), (other, _, _), *rest = run_without(
        [*NOT_FOR_FILES, *extras["files"]],
        [["--help"], ["--version"], *([name, "classify"] for name in COMMANDS)],
    )
    assert (code, other) == (0, 0)
    assert "weightnorm inspect" in overview
    for name, (code, _, err) in zip(COMMANDS, rest, strict=True):
        assert code == 1
        assert re.match(f"failed: weightnorm {name} needs the package \\w+", err)
        extra = "files" if name in ("convert", "inspect") else "lab"
        assert f"pip install 'weightnorm[{extra}]'" in err


# — random words, with the training replaced by a stub —

FLAGS = sorted(
    {
        f"--{name.replace('_', '-')}"
        for module in MODULES
        for name in vars(module.PRESETS["demo"])
        if name != "out"
    }
)
SWEEP_FLAGS = ["--parameterizations", "--learning-rates", "--seeds", "--jobs", "--metric"]
VALUES = st.sampled_from(
    [
        *("0", "1", "-1", "2", "0.5", "nan", "inf", "-inf", "1e400", "1e-400", "9" * 30, "", " "),
        *("--", "None", "True", "cpu", "demo", "paper", "digits", "cifar10", "weight-norm"),
        *("batch-norm", "standard", "cuda", "meta", "/proc/x", "é\x1b[2J", "test_error", "pong"),
    ]
) | st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=6)


def word_lists(flags):
    flag = st.tuples(st.sampled_from(flags), VALUES)
    joined = flag.map("=".join).map(lambda word: (word,))
    several = st.tuples(st.sampled_from(flags), VALUES, VALUES)
    return st.lists(flag | joined | several | st.tuples(VALUES), max_size=4).map(
        lambda parts: [word for part in parts for word in part]
    )


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """Replace all training by stubs that return a record at once."""

    def stub(module):
        def run(config, console=None):
            result = {**dict.fromkeys(module.RESULTS, 0.5), "seconds": 1.0}
            fields = scientific_fields(config)
            return RunRecord(Path("x"), module.NAME, config.preset, fields, result=result)

        return run

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("fuzz"))
        for module in MODULES:
            monkeypatch.setattr(module, "run", stub(module))
        monkeypatch.setattr(sweeps._Execution, "run", lambda self, *_: self.left.clear())
        yield


@settings(max_examples=100)
@given(
    st.sampled_from(["run", "sweep"]),
    st.sampled_from([*EXPERIMENTS, "clasify", "", "--help"]),
    word_lists(FLAGS + SWEEP_FLAGS * 2),
)
def test_random_words(stubs, verb, name, words):
    assert exit_code([verb, name, *words]) in (0, 1, 2, 130)
