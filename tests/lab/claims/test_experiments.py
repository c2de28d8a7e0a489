"""Statements that are read from records on disk: of the experiments and of the benchmark."""

import json
import math
import shutil

import pytest

from weightnorm.lab import classify, dqn, draw, vae
from weightnorm.lab.claims.claim import Context
from weightnorm.lab.claims.cost import mean_only_cost, step_time
from weightnorm.lab.claims.experiments import (
    BOUND,
    GAMES,
    cifar10_ordering,
    comparable_runs,
    final,
    four_games,
    other_experiments,
    over_epochs,
)
from weightnorm.lab.config import scientific_fields
from weightnorm.lab.records import write_json

TRUE, FALSE, OPEN, NONE = "reproduced", "not reproduced", "not shown", "not measured"
ERRORS = {
    "standard": 0.3,
    "weight-norm": 0.21,
    "batch-norm": 0.2,
    "mean-only-batch-norm": 0.25,
    "weight-norm-mean-only": 0.15,
}


def write_run(root, experiment, how, seed, result, curve=(), **config):
    preset = experiment.PRESETS["cpu"]
    fields = {**scientific_fields(preset), "parameterization": how, "seed": seed, **config}
    folder = root / experiment.NAME / str(len(list(root.rglob("config.json"))))
    folder.mkdir(parents=True)
    head = {"experiment": experiment.NAME, "preset": "cpu", "config": fields}
    write_json(folder / "config.json", head)
    write_json(folder / "result.json", result)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve))


def write_errors(root, how, train, test, seeds=(1, 2, 3), **config):
    for seed in seeds:
        result = {"train_error": train * (1 + seed / 1000), "test_error": test * (1 + seed / 1000)}
        curve = [{"train_error": train * x} for x in (2, 1.5, 1.2, 1)]
        write_run(root, classify, how, seed, result, curve, **config)


def write_bounds(root, experiment, how, bounds, **config):
    for seed, bound in enumerate(bounds, 1):
        result = {BOUND: bound, "train_negative_elbo": bound}
        curve = [{BOUND: None if bound is None else bound + 3 - i} for i in range(4)]
        write_run(root, experiment, how, seed, result, curve, **config)


def write_scores(root, how, scores, **config):
    for seed, score in enumerate(scores, 1):
        curve = [{"train_score": score * x} for x in (0.1, 0.5, 0.8, 1)]
        write_run(root, dqn, how, seed, {"best_score": score}, curve, **config)


def verdicts(measure, records):
    return [outcome.verdict for outcome in measure(Context(records=records))]


# CIFAR-10


def test_statements_about_cifar10(tmp_path):
    assert verdicts(cifar10_ordering, tmp_path) == [NONE] * 9
    for how, error in ERRORS.items():
        rate = 0.003 if "weight" in how else 0.0003
        test = {"standard": 0.25, "weight-norm": 0.251, "mean-only-batch-norm": 0.252}
        write_errors(tmp_path, how, error, test.get(how, error), learning_rate=rate)
    assert verdicts(cifar10_ordering, tmp_path) == [TRUE] * 8 + [NONE]
    for how in ("standard", "weight-norm"):  # a grid at a seed of its own: only it is compared
        for rate in (0.0003, 0.001, 0.003, 0.01):
            best = {"standard": 0.0003, "weight-norm": 0.003}[how]
            error = ERRORS[how] * (1 if rate == best else 1.2)
            write_errors(tmp_path, how, error, 0.9, seeds=(7,), learning_rate=rate)
    found = cifar10_ordering(Context(records=tmp_path))
    assert [outcome.verdict for outcome in found] == [TRUE] * 9
    assert found[4].n == 3  # the seed that chose the rates is not averaged into the result
    assert "smaller than the paper's" in found[0].value


@pytest.mark.parametrize(
    ("how", "train", "test", "statement", "verdict"),
    [
        ("weight-norm", 0.31, None, 1, FALSE),
        ("batch-norm", 0.22, None, 2, FALSE),
        ("batch-norm", 0.1, None, 3, FALSE),
        ("mean-only-batch-norm", 0.1, None, 4, FALSE),
        ("standard", None, 0.35, 5, FALSE),
        ("batch-norm", None, 0.26, 6, FALSE),
        ("weight-norm-mean-only", None, 0.24, 7, FALSE),
        ("weight-norm-mean-only", None, 0.26, 8, FALSE),
    ],
)
def test_statements_about_cifar10_fail(tmp_path, how, train, test, statement, verdict):
    for name, error in ERRORS.items():
        mine = name == how
        write_errors(
            tmp_path, name, train if mine and train else error, test if mine and test else 0.25
        )
    assert verdicts(cifar10_ordering, tmp_path)[statement - 1] == verdict


def test_settings_are_not_mixed(tmp_path):
    """Runs of another precision or length are another comparison, rates are chosen by training."""
    for rate, train in ((0.001, 0.3), (0.003, 0.2)):
        write_errors(tmp_path, "standard", train, 1 - train, seeds=(1,), learning_rate=rate)
    write_errors(tmp_path, "standard", 0.1, 0.1, seeds=(1,), precision="bfloat16")
    write_errors(tmp_path, "standard", 0.1, 0.1, seeds=(1,), epochs=60)
    found = {runs.label.partition(",")[0]: runs for runs in comparable_runs(tmp_path, classify)}
    label = "classify cpu cifar10"
    assert {*found} == {label, f"{label} precision=bfloat16", f"{label} epochs=60"}
    errors = found[label].by_seed("standard", final("test_error"))
    assert errors == {1: pytest.approx(0.8 * 1.001)}


def test_the_papers_size_is_that_of_all_settings_and_is_judged_first(tmp_path):
    paper = scientific_fields(classify.PRESETS["paper"])
    paper = {k: v for k, v in paper.items() if k not in ("parameterization", "seed")}
    for how, error in ERRORS.items():
        write_errors(tmp_path, how, error, error, seeds=(1, 2, 3, 4))
        write_errors(tmp_path, how, error, 0.1, seeds=(1, 2), **paper)
    found = cifar10_ordering(Context(records=tmp_path))[0]
    assert "smaller" not in found.value
    assert found.n == 2


def test_copies_demos_and_damaged_configs_do_not_count(tmp_path):
    write_bounds(tmp_path / "runs", draw, "standard", [110.0, 112.0])
    write_bounds(tmp_path / "runs", draw, "weight-norm", [100.0, 101.0])
    older = next((tmp_path / "runs").rglob("config.json"))  # from before a setting existed
    head = json.loads(older.read_text())
    del head["config"]["clip"]
    older.write_text(json.dumps(head))
    (before,) = comparable_runs(tmp_path, draw)
    shutil.copytree(tmp_path / "runs", tmp_path / "backup")
    write_run(tmp_path / "damaged", draw, "standard", None, {BOUND: 1.0})
    write_bounds(tmp_path / "demo", draw, "standard", [1.0])
    for path in (tmp_path / "demo").rglob("config.json"):
        path.write_text(path.read_text().replace('"preset": "cpu"', '"preset": "demo"'))
    (after,) = comparable_runs(tmp_path, draw)
    assert (before.n, after.n) == (4, 4)
    for arm in ("standard", "weight-norm"):
        assert after.by_seed(arm, final(BOUND)) == before.by_seed(arm, final(BOUND))


def test_a_curve_with_a_gap_has_no_mean(tmp_path):
    write_run(tmp_path, draw, "standard", 1, {}, [{BOUND: 1.0}, {BOUND: 3.0}])
    write_run(tmp_path, draw, "standard", 2, {}, [{BOUND: 1.0}, {BOUND: None}])
    (runs,) = comparable_runs(tmp_path, draw)
    assert runs.by_seed("standard", over_epochs(BOUND, "all epochs")) == {1: 2.0, 2: math.inf}


# The other experiments


def test_statements_about_the_other_experiments(tmp_path):
    assert verdicts(other_experiments, tmp_path) == [NONE] * 5
    for data in ("mnist", "cifar10"):
        write_bounds(tmp_path, vae, "standard", [90.0, 91.0, 92.0], data=data)
        write_bounds(tmp_path, vae, "weight-norm", [86.0, 86.1, 86.05], data=data)
    write_bounds(tmp_path, draw, "standard", [100.0, 102.0, 101.0])
    write_bounds(tmp_path, draw, "weight-norm", [104.0, 106.5, 105.0])
    write_scores(tmp_path, "standard", [100.0, 101.0])
    write_scores(tmp_path, "weight-norm", [120.0, 121.5])
    assert verdicts(other_experiments, tmp_path) == [TRUE, TRUE, FALSE, TRUE, TRUE]
    # Initial values of g are alternatives, of which the paper names none: the best counts.
    other = {"initial_g": "one-except-windows"}
    write_bounds(tmp_path, draw, "weight-norm", [90.0, 91.0, 92.0], **other)
    found = other_experiments(Context(records=tmp_path))[2]
    assert found.verdict == TRUE
    assert "weight-norm 4.17 [" in found.value
    assert "initial_g=one-except-windows -10 [" in found.value


def test_the_other_experiments_fail(tmp_path):
    write_bounds(tmp_path, vae, "standard", [90.0, 90.01, 90.02], data="mnist")
    write_bounds(tmp_path, vae, "weight-norm", [70.0, 80.0, 75.0], data="mnist")
    found = other_experiments(Context(records=tmp_path))
    assert [found[0].verdict, found[1].verdict] == [NONE, FALSE]  # no CIFAR-10; it varies more
    write_scores(tmp_path, "standard", [120.0, 121.5])
    write_scores(tmp_path, "weight-norm", [100.0, 101.0])
    assert verdicts(other_experiments, tmp_path)[3:] == [FALSE, FALSE]


@pytest.mark.parametrize("bounds", [[80.0], [80.0, None]])
def test_one_seed_and_a_diverged_run_show_nothing(tmp_path, bounds):
    for data in ("mnist", "cifar10"):
        write_bounds(tmp_path, vae, "standard", [90.0, 91.0], data=data)
        write_bounds(tmp_path, vae, "weight-norm", bounds, data=data)
    assert verdicts(other_experiments, tmp_path)[:2] == [OPEN, OPEN]


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ((1.15, 1.2, 1.25, 1.2), TRUE),
        ((0.98, 1.2, 1.1, 1.3), OPEN),
        ((0.85, 0.8, 0.75, 0.8), FALSE),
    ],
)
def test_four_games(tmp_path, gains, verdict):
    for game, gain in zip(GAMES, gains, strict=True):
        assert verdicts(four_games, tmp_path) == [NONE]
        write_scores(tmp_path, "standard", [100.0, 110.0], game=game)
        write_scores(tmp_path, "weight-norm", [100 * gain, 110 * gain], game=game)
    assert verdicts(four_games, tmp_path) == [verdict]


# The benchmark's record


def write_benchmark(root, weight_norm, batch_norm, mean_only):
    def case(name, **samples):
        rounds = {k.replace("_", " "): [x * (1 + i / 1000) for i in range(8)]
                  for k, x in samples.items()}  # fmt: skip
        return {"case": name, "samples": rounds, "rounds": 8, "goals": []}

    step = {"plain": 1.0, "weight_norm": weight_norm, "batch_norm": batch_norm}
    layer = {"convolution_alone": 1.0, "batch_norm": 1.5, "mean-only": 1 + mean_only}
    name = "96 channels, 100 images, 3×3, "
    both = {"weight norm + mean-only": [1.0] * 8}
    first = case("batch of 100", **step)
    first["samples"] |= both
    record = {
        "settings": {"quick": False},
        "environment": {"machine": "m"},
        "benchmarks": [
            {"name": "step", "cases": [first]},
            {
                "name": "mean-only",
                "cases": [case(name + layout, **layer) for layout in ("NCHW", "channels-last")],
            },
        ],
    }
    (root / "bench").mkdir(exist_ok=True)
    write_json(root / "bench" / "result.json", record)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((1.005, 1.16, 0.2), [TRUE, TRUE, TRUE]),
        ((1.16, 1.16, 0.2), [TRUE, FALSE, TRUE]),
        ((1.0, 1.02, 0.6), [FALSE, TRUE, FALSE]),
    ],
)
def test_cost_is_read_from_the_benchmark(tmp_path, numbers, expected):
    assert verdicts(step_time, tmp_path) + verdicts(mean_only_cost, tmp_path) == [NONE] * 3
    write_benchmark(tmp_path, *numbers)
    assert verdicts(step_time, tmp_path) + verdicts(mean_only_cost, tmp_path) == expected
