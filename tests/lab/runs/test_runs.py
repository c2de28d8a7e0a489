"""Runs through the real command line: killed, interrupted, damaged, watched, spread over ranks."""

import json
import os
import pty
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from commands import (
    BASE,
    environment,
    outcome,
    run_folder,
    same,
    spread,
    started,
    wait_for,
    weightnorm,
)
from weightnorm.lab.experiments import classify
from weightnorm.lab.runs.records import load_record
from weightnorm.lab.runs.run import Run

TINY = ("run", "classify", "--preset", "demo", "--epochs", 4, "--limit", 300, "--batch-size", 20)


def tiny(runs, *more):
    return (*TINY, "--runs", runs, *more)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The same run, never disturbed."""
    runs = tmp_path_factory.mktemp("reference")
    code, out, err = weightnorm(*tiny(runs))
    assert code == 0, err
    assert "test error" in out
    return runs


def test_a_run_leaves_its_record(reference):
    folder = run_folder(reference)
    assert folder.relative_to(reference).parts[0] == "classify"
    record = load_record(folder)
    assert [row["epoch"] for row in record.metrics] == [1, 2, 3, 4]
    assert record.config["limit"] == 300
    assert record.result["test_error"] == record.metrics[-1]["test_error"]
    (session,) = record.sessions
    assert {"commit", "torch", "python", "device", "threads", "machine"} <= set(session)
    assert all(row["seconds"] > 0 for row in record.metrics)
    assert list((folder / "events").glob("events.out.tfevents.*"))


@pytest.mark.parametrize("seconds", [0, 60], ids=["checkpoint-each-step", "each-epoch"])
def test_killed_at_random_moments_it_ends_with_the_same_bits(tmp_path, reference, seconds):
    chance = random.Random(seconds)
    command = tiny(tmp_path, "--checkpoint-seconds", seconds)
    kills = 0
    while kills < 4:
        process = started(*command)
        try:
            wait_for(lambda p=process: p.poll() is not None or [*tmp_path.rglob("sessions.jsonl")])
            time.sleep(chance.uniform(0, 0.5))
            process.kill()
        finally:
            process.communicate()
        if process.returncode == 0:  # it was quicker
            break
        kills += 1
    assert kills
    assert weightnorm(*command)[0] == 0
    assert same(outcome(tmp_path), outcome(reference))


def test_interrupted_it_saves_and_prints_the_command_that_goes_on(tmp_path, reference):
    process = started(*tiny(tmp_path))
    wait_for(lambda: list(tmp_path.rglob("checkpoint.pt")))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "everything is saved" in err
    words = shlex.split(re.search(r"to resume:\s+weightnorm (.*)", err).group(1))
    assert weightnorm(*words)[0] == 0
    assert same(outcome(tmp_path), outcome(reference))


def test_a_finished_run_is_not_run_again(reference):
    folder = run_folder(reference)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != "lock"}
    code, out, _ = weightnorm(*tiny(reference))
    assert code == 0
    assert "test error" in out
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != "lock"} == before


@pytest.fixture
def stopped(tmp_path):
    """A run interrupted after its first epoch, with two generations of checkpoints."""
    process = started(*tiny(tmp_path, "--checkpoint-seconds", 0))
    wait_for(lambda: list(tmp_path.rglob("checkpoint-previous.pt")))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    return tmp_path


def test_a_damaged_checkpoint_falls_back_to_the_one_before(stopped, reference):
    newest = run_folder(stopped) / "checkpoint.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    with (run_folder(stopped) / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 9, "tr')
    assert weightnorm(*tiny(stopped))[0] == 0
    assert same(outcome(stopped), outcome(reference))


def test_without_a_readable_checkpoint_it_says_so(stopped):
    for path in run_folder(stopped).glob("checkpoint*.pt"):
        path.write_bytes(b"not a checkpoint")
    code, _, err = weightnorm(*tiny(stopped))
    assert code == 1
    assert "the checkpoint is damaged; delete the run's folder to start over" in err


def test_a_checkpoint_cannot_run_code(stopped, tmp_path):
    import pickle

    witness = tmp_path / "witness"

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(witness),)

    for path in run_folder(stopped).glob("checkpoint*.pt"):
        path.write_bytes(pickle.dumps(Evil()))
    assert weightnorm(*tiny(stopped))[0] == 1
    assert not witness.exists()


def test_a_full_disk_loses_nothing(stopped, reference):
    folder = run_folder(stopped)
    before = (folder / "checkpoint.pt").read_bytes()
    limit = ("bash", "-c", 'ulimit -f 8; exec "$@"', "limited")  # 8 KiB a file
    code, _, err = weightnorm(*tiny(stopped, "--checkpoint-seconds", 0), prefix=limit)
    assert code == 1
    assert "Nothing already written is lost" in err
    assert "Traceback" not in err
    assert (folder / "checkpoint.pt").read_bytes() == before
    assert not list(folder.glob(".*"))
    assert weightnorm(*tiny(stopped))[0] == 0
    assert same(outcome(stopped), outcome(reference))


def test_an_unwritable_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = weightnorm(*tiny(tmp_path / "file"))
    assert code == 1
    assert "cannot write to" in err


def test_two_processes_do_not_share_a_folder(tmp_path):
    first = started(*tiny(tmp_path, "--epochs", 500))
    wait_for(lambda: list(tmp_path.rglob("sessions.jsonl")))
    code, _, err = weightnorm(*tiny(tmp_path, "--epochs", 500))
    first.kill()
    first.communicate()
    assert code == 1
    assert "another process is running in" in err


def test_a_folder_of_other_settings_is_refused(tmp_path, reference):
    shutil.copytree(reference, tmp_path, dirs_exist_ok=True)
    config = run_folder(tmp_path) / "config.json"
    head = json.loads(config.read_text())
    head["config"]["noise"] = 0.5
    config.write_text(json.dumps(head))
    code, _, err = weightnorm(*tiny(tmp_path))
    assert code == 2
    assert "holds a run with other settings (noise)" in err


def test_without_data_it_names_the_files(tmp_path):
    code, _, err = weightnorm(
        "run", "classify", "--data-dir", tmp_path / "nothing", "--runs", tmp_path / "runs"
    )
    assert code == 1
    assert "data_batch_1" in err
    assert "c99cafc152244af753f735de768cd75f" in err
    assert str(tmp_path / "nothing" / "cifar-10-batches-py") in err
    assert "Traceback" not in err


def test_a_pipe_gets_plain_lines(reference, tmp_path):
    code, out, err = weightnorm(*tiny(tmp_path, "--epochs", 1))
    assert code == 0
    assert re.search(r"epoch 1/1  train loss [\d.]+  train error", err)
    assert "\x1b" not in out + err


def test_a_terminal_gets_bars(tmp_path):
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*BASE, *map(str, tiny(tmp_path, "--epochs", 2))],
        stdout=slave,
        stderr=slave,
        env=environment(TERM="xterm-256color"),
    )
    os.close(slave)
    seen = b""
    while process.poll() is None or select.select([master], [], [], 0.1)[0]:
        if select.select([master], [], [], 0.1)[0]:
            try:
                seen += os.read(master, 65536)
            except OSError:
                break
    os.close(master)
    text = seen.decode()
    assert process.wait(60) == 0, text
    assert "━" in text
    assert "epochs" in text
    assert "steps" in text
    assert "left" in text


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_learns(tmp_path, precision):
    code, _, err = weightnorm(*tiny(tmp_path, "--precision", precision))
    assert code == 0, err
    loss = load_record(run_folder(tmp_path)).column("train_loss")
    assert loss[-1] < loss[0]


def test_two_ranks_are_one_process_with_the_same_batch(tmp_path):
    quiet = ("--parameterization", "weight-norm-mean-only", "--noise", 0, "--dropout", 0)
    quiet = (*quiet, "--epochs", 1, "--limit", 111, "--init-examples", 51)
    spread(2, *tiny(tmp_path / "two", *quiet))
    together = load_record(run_folder(tmp_path / "two"))
    assert weightnorm(*tiny(tmp_path / "one", *quiet))[0] == 0
    alone = load_record(run_folder(tmp_path / "one"))
    assert together.environment["ranks"] == 2
    for name in ("train_loss", "test_loss", "v_norm", "effective_step"):
        assert together.column(name) == pytest.approx(alone.column(name), rel=1e-4)
    weights = [
        torch.load(run_folder(tmp_path / name) / "checkpoint.pt", weights_only=True)["states"][
            "model"
        ]
        for name in ("one", "two")
    ]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], atol=1e-3, rtol=1e-3)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_good(tmp_path):
    words = tiny(tmp_path, "--parameterization", "standard", "--checkpoint-seconds", 0)
    code, _, err = weightnorm(*words, "--learning-rate", 1e30)
    assert code == 1
    assert re.search(r"not finite at epoch 1, step \d+: .*loss nan", err)
    assert re.search(r"longest weights.*\d\.weight", err)
    folder = run_folder(tmp_path)
    failed, before = (
        torch.load(folder / name, weights_only=True) for name in ("failed.pt", "checkpoint.pt")
    )
    assert failed["step"] == before["step"] + 1
    assert not failed["totals"]["loss"].isfinite()
    assert before["totals"]["loss"].isfinite()
    assert not (folder / "result.json").exists()


def test_arrays_are_kept_beside_the_record(tmp_path):
    config = replace(classify.PRESETS["demo"], runs=tmp_path)
    with Run("classify", config, classify.PRESETS) as run:
        run.keep("samples", images=torch.arange(6).view(2, 3))
    with np.load(run.folder / "samples.npz") as arrays:
        assert arrays["images"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_steps_without_examples_are_saved_as_often_as_asked(tmp_path, monkeypatch):
    config = replace(classify.PRESETS["demo"], runs=tmp_path)
    with Run("classify", config, classify.PRESETS) as run:
        run.restore()
        saved, save = [], run.save
        monkeypatch.setattr(
            run, "save", lambda *path: (saved.append((run.epoch, run.step)), save())
        )
        for _ in run.epochs(2):
            assert list(run.steps(5, save_every=2)) == [0, 1, 2, 3, 4]
            run.log()
    assert saved == [(0, 2), (0, 4), (1, 0), (1, 2), (1, 4), (2, 0)]
    with Run("classify", config, classify.PRESETS) as run:
        run.restore()
        run.epoch, run.step = 1, 3
        assert [list(run.steps(5)) for _ in run.epochs(2)] == [[3, 4]]


def test_every_flag_is_explained_and_a_misspelt_one_is_refused():
    code, out, _ = weightnorm("run", "classify", "--help")
    assert code == 0
    for flag in ("--parameterization", "--learning-rate", "--epochs", "--device", "--compile"):
        assert flag in out
    code, _, err = weightnorm("run", "classify", "--lerning-rate", "1")
    assert code == 2
    assert "--learning-rate" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rnu"], "did you mean 'run'?"),
        (["run"], "which experiment?"),
        (["run", "clasify"], "did you mean 'classify'?"),
        (["run", "classify", "--preset", "demmo"], "did you mean --preset demo?"),
        (["run", "classify", "--epochs", "0"], "epochs is 0; expected 1 or more"),
        (["run", "classify", "--learning-rate", "inf"], "learning-rate is inf; expected"),
        (["sweep", "classify", "--seed", "2"], "a grid takes --seeds"),
        (["data", "--download", "cifar"], "did you mean 'cifar10'?"),
    ],
)
def test_usage_errors_exit_with_2_and_name_the_nearest(words, says):
    code, _, err = weightnorm(*words)
    assert code == 2
    assert says in err


def test_overview_and_list():
    assert "weightnorm demo" in weightnorm()[1]
    code, out, _ = weightnorm("list")
    assert code == 0
    assert "classify" in out
    assert "paper" in out
