"""Command lines of `run` and `sweep`: no input leads to a traceback."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import HANGS, started, weightnorm
from weightnorm.lab.cli.experiments import EXPERIMENTS
from weightnorm.lab.cli.main import main
from weightnorm.lab.config import scientific_fields
from weightnorm.lab.records import RunRecord
from weightnorm.lab.sweeps import grid

SWEEP = ("sweep", "classify", "--preset", "demo")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "did you mean 'run'?"),
        (["run"], "experiment"),
        (["run", "clasify"], "did you mean 'classify'?"),
        (["run", "classify", "--preset", "demmo"], "did you mean --preset demo?"),
        (["run", "classify", "--epochs", "0"], "epochs is 0; expected"),
        (["run", "classify", "--learning-rate", "inf"], "learning-rate is inf; expected"),
        (["run", "classify", "--lerning-rate", "1"], "--learning-rate"),
        (["run", "classify", "--device", "cuda:77"], "device is cuda:77; expected a device of"),
        (["run", "classify", "--seed", "-1"], "seed is -1; expected"),
        (["run", "vae", "--parameterization", "batch-norm"], "parameterization is batch-norm"),
        ([*SWEEP, "--seed", "2"], "a grid takes --seeds"),
        ([*SWEEP, "--seeds", "1", "1"], "give each value once"),
        ([*SWEEP, "--seeds", "-1"], "seed is -1; expected"),
        ([*SWEEP, "--jobs", "0"], "jobs is 0; expected 1 or more"),
        ([*SWEEP, "--metric", "tets_error"], "metric is tets_error; expected one of train_error"),
        ([*SWEEP, "--parameterizations", "batchnorm"], "batch-norm"),
        ([*SWEEP, "--device", "nonsense"], "device is nonsense; expected a device of this machi"),
        (
            ["sweep", "vae", "--preset", "demo", "--parameterizations", "batch-norm"],
            "parameterizations is batch-norm; expected one or more of standard, weight-norm",
        ),
        (["data", "--download", "cifar"], "did you mean 'cifar10'?"),
    ],
)
def test_usage_errors(words, message, tmp_path, monkeypatch, capsys):
    """Exit code 2 before anything is written, with the valid values in the message."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    try:
        code = main(words)
    except SystemExit as stop:  # raised by tyro
        code = stop.code
    assert code == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("run", "classify", "--preset", "demo", "--runs", "{file}/runs"),
        ("sweep", "classify", "--preset", "demo", "--runs", "{file}/runs", "--seeds", "1"),
        ("report", "{folder}", "--out", "{file}/report"),
    ],
    ids=lambda words: words[0],
)
def test_output_folder_that_cannot_be_made(words, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    words = [word.format(file=tmp_path / "file", folder=tmp_path) for word in words]
    assert main(words) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.err.strip()


def test_real_command_line(tmp_path):
    """Usage errors, a missing device and a closed standard output, in real processes."""
    for words, code in (
        (("run", "classify", "--device", "cuda:77", "--runs", tmp_path), 2),
        ((*SWEEP, "--jobs", "0", "--runs", tmp_path), 2),
    ):
        got, _, err = weightnorm(*words)
        assert got == code, err
        assert err.startswith("error: ")
        assert "Traceback" not in err
    close = ("bash", "-c", '"$@" | true; exit ${PIPESTATUS[0]}', "closed")
    _, _, err = weightnorm("run", "classify", "--help", prefix=close)
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize("seconds", [0.1, 0.4, 0.8, 1.5, 2.5])
def test_ctrl_c_while_importing(tmp_path, seconds):
    process = started(*("run", "classify", "--preset", "demo", "--runs", tmp_path))
    wait_until_python_runs(process.pid)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130, err
    assert "Traceback" not in out + err


def test_interrupt_inside_exec_has_the_exit_code_of_an_interrupt(tmp_path):
    """CPython would end the process by a signal; imports of generated code use `exec`."""
    code = (
        "import sys; sys.argv = ['weightnorm', 'list']\n"
        "import weightnorm.__main__ as program\n"
        "from weightnorm.lab.cli import list as verb\n"
        "verb.main = lambda words: exec('raise KeyboardInterrupt')\n"
        "sys.exit(program.main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_other_programs_keep_their_interrupt_handler():
    """Also those run with -m whose package imports weightnorm."""
    code = "import signal, sys; sys.argv = ['-m']; import weightnorm; print(signal.getsignal(2))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "default_int_handler" in done.stdout


def wait_until_python_runs(pid):
    """Wait until the interpreter has installed its own SIGINT handler and imports weightnorm."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            return
        if "libtorch" in maps:  # imported by weightnorm/__init__.py, after the handler is set
            return
        time.sleep(0.005)


# — fuzzing, with the training replaced by a stub —

FLAGS = sorted(
    {
        f"--{name.replace('_', '-')}"
        for module in EXPERIMENTS.values()
        for name in vars(module.PRESETS["demo"])
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
NAMES = st.sampled_from([*EXPERIMENTS, "clasify", "", "--help"])


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
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path_factory.mktemp("fuzz"))
        replace_training(monkeypatch)
        yield


def replace_training(monkeypatch):

    def stub(module):
        def run(config, console=None):
            fields = scientific_fields(config)
            result = {**dict.fromkeys(module.RESULTS, 0.5), "seconds": 1.0}
            return RunRecord(Path("x"), module.NAME, config.preset, fields, result=result)

        return run

    for module in EXPERIMENTS.values():
        monkeypatch.setattr(module, "run", stub(module))
    monkeypatch.setattr(grid, "execute", lambda left, *_: left.clear() or [])


def exit_code(words):
    try:
        return main(words)
    except SystemExit as stop:
        return stop.code


@settings(max_examples=150)
@given(NAMES, word_lists(FLAGS))
def test_fuzz_run(stubs, name, words):
    assert exit_code(["run", name, *words]) in (0, 1, 2, 130)


@settings(max_examples=150)
@given(NAMES, word_lists(FLAGS + SWEEP_FLAGS * 3))
def test_fuzz_sweep(stubs, name, words):
    assert exit_code(["sweep", name, *words]) in (0, 1, 2, 130)
