"""Claims 18 and 20, from records on disk."""

import json
import shutil

from weightnorm.lab.claims.context import Context
from weightnorm.lab.claims.from_records import cifar10_ordering, comparable_runs, other_experiments
from weightnorm.lab.experiments import classify, dqn, draw, vae
from weightnorm.lab.runs.config import scientific_fields
from weightnorm.lab.runs.records import write_json


def write_run(root, experiment, how, seed, result, curve=(), **config):
    preset = experiment.PRESETS["cpu"]
    fields = {**scientific_fields(preset), "parameterization": how, "seed": seed, **config}
    folder = root / experiment.NAME / str(len(list(root.rglob("config.json"))))
    folder.mkdir(parents=True)
    head = {"experiment": experiment.NAME, "preset": "cpu", "config": fields}
    write_json(folder / "config.json", head)
    write_json(folder / "result.json", result)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve))


def write_bounds(root, experiment, how, bounds, **config):
    for seed, bound in enumerate(bounds, 1):
        result = {"test_negative_elbo": bound, "train_negative_elbo": bound}
        curve = [{"test_negative_elbo": bound + 3 - i} for i in range(4)]
        write_run(root, experiment, how, seed, result, curve, **config)


def test_settings_are_not_mixed(tmp_path):
    """Runs of another precision or length are another comparison, rates are chosen by training."""
    for rate, train in ((0.001, 0.3), (0.003, 0.2)):
        result = {"train_error": train, "test_error": 1 - train}
        write_run(tmp_path, classify, "standard", 1, result, learning_rate=rate)
    result = {"train_error": 0.1, "test_error": 0.1}
    write_run(tmp_path, classify, "standard", 1, result, precision="bfloat16")
    write_run(tmp_path, classify, "standard", 1, result, epochs=60)
    found = {runs.label: runs for runs in comparable_runs(tmp_path, classify)}
    assert set(found) == {
        "cpu cifar10",
        "cpu cifar10 precision=bfloat16",
        "cpu cifar10 epochs=60",
    }
    assert found["cpu cifar10"].results("test_error") == {"standard": {1: 0.8}}


def test_cifar10_ordering(tmp_path):
    errors = {
        "standard": 0.3,
        "weight-norm": 0.2,
        "batch-norm": 0.15,
        "mean-only-batch-norm": 0.2,
        "weight-norm-mean-only": 0.1,
    }
    context = Context(runs=tmp_path)
    assert cifar10_ordering(context).verdict == "not measured"
    for how, error in errors.items():
        for seed in (1, 2, 3):
            result = {"train_error": error + seed / 1000, "test_error": error}
            write_run(tmp_path, classify, how, seed, result)
    found = cifar10_ordering(context)
    assert found.verdict == "holds qualitatively"
    assert found.n == 15
    assert set(found.numbers["faster"].values()) == {"ahead"}


def test_initial_values_of_g_are_alternatives(tmp_path):
    write_bounds(tmp_path, draw, "standard", [100.0, 102.0, 101.0])
    write_bounds(tmp_path, draw, "weight-norm", [104.0, 106.5, 105.0])
    context = Context(runs=tmp_path / "elsewhere", experiment_records=tmp_path)
    assert other_experiments(context).verdict == "does not hold here"
    other = {"initial_g": "one-except-windows"}
    write_bounds(tmp_path, draw, "weight-norm", [90.0, 91.0, 92.0], **other)
    found = other_experiments(context)
    assert found.verdict == "not shown"  # the other experiments are missing
    assert "weight-norm 105.17 ± 1.3 (n = 3) (behind)" in found.value
    assert "initial_g=one-except-windows 91.00 ± 1 (n = 3) (ahead; reaches" in found.value
    for data in ("mnist", "cifar10"):
        write_bounds(tmp_path, vae, "standard", [90.0, 91.0], data=data)
        write_bounds(tmp_path, vae, "weight-norm", [89.0, 90.0], data=data)
    for how, score in {"standard": 100.0, "weight-norm": 120.0}.items():
        for seed in (1, 2):
            write_run(tmp_path, dqn, how, seed, {"best_score": score + seed})
    found = other_experiments(context)
    assert found.verdict == "holds qualitatively", found.value
    write_run(tmp_path, dqn, "standard", 1, {"best_score": 9.0}, game="breakout")
    write_run(tmp_path, dqn, "weight-norm", 1, {"best_score": 1.0}, game="breakout")
    assert other_experiments(context).verdict == "holds qualitatively"  # one seed does not count


def test_a_diverged_run_is_not_ahead(tmp_path):
    write_bounds(tmp_path, vae, "standard", [90.0, 91.0], data="mnist")
    write_bounds(tmp_path, vae, "weight-norm", [80.0], data="mnist")
    result = {"test_negative_elbo": None, "train_negative_elbo": None}
    write_run(tmp_path, vae, "weight-norm", 2, result, data="mnist")
    found = other_experiments(Context(runs=tmp_path))
    assert found.verdict == "not shown"


def test_records_from_before_a_setting_existed_have_its_default(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path, dqn, "standard", seed, {"best_score": 1.0})
    path = next(tmp_path.rglob("config.json"))
    head = json.loads(path.read_text())
    del head["config"]["precision"]
    path.write_text(json.dumps(head))
    (runs,) = comparable_runs(tmp_path, dqn)
    assert runs.n == 2


def test_copies_and_damaged_configs_do_not_count(tmp_path):
    write_bounds(tmp_path / "runs", draw, "standard", [110.0, 112.0])
    write_bounds(tmp_path / "runs", draw, "weight-norm", [100.0, 101.0])
    (before,) = comparable_runs(tmp_path, draw)
    shutil.copytree(tmp_path / "runs", tmp_path / "backup")
    write_run(tmp_path / "damaged", draw, "standard", None, {"test_negative_elbo": 1.0})
    (after,) = comparable_runs(tmp_path, draw)
    assert (before.n, after.n) == (4, 4)
    assert after.results("test_negative_elbo") == before.results("test_negative_elbo")
