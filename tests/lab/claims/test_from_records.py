"""Claims 18 and 20, from records on disk."""

import json
import math
import shutil

from weightnorm import Parameterization
from weightnorm.lab import classify, dqn, draw, vae
from weightnorm.lab.claims.context import Context
from weightnorm.lab.claims.from_records import (
    BOUND,
    cifar10_ordering,
    comparable_runs,
    final_value,
    other_experiments,
    over_training,
)
from weightnorm.lab.config import scientific_fields
from weightnorm.lab.records import write_json


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
    assert found["cpu cifar10"].results(final_value("test_error")) == {"standard": {1: 0.8}}


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


def write_scores(root, how, scores, **config):
    for seed, score in enumerate(scores, 1):
        curve = [{"score": score - 30}, {"score": score}, {"score": score - 10}]
        write_run(root, dqn, how, seed, {"best_score": score, "score": score - 10}, curve, **config)


def test_initial_values_of_g_are_alternatives(tmp_path):
    write_bounds(tmp_path, draw, "standard", [100.0, 102.0, 101.0])
    write_bounds(tmp_path, draw, "weight-norm", [104.0, 106.5, 105.0])
    context = Context(runs=tmp_path / "elsewhere", experiment_records=tmp_path)
    assert other_experiments(context).verdict == "does not hold here"
    other = {"initial_g": "one-except-windows"}
    write_bounds(tmp_path, draw, "weight-norm", [90.0, 91.0, 92.0], **other)
    found = other_experiments(context)
    assert found.verdict == "not shown"  # the other experiments are missing
    assert "bound over training: standard 102.50 ± 1 (n = 3), weight-norm 106.67" in found.value
    assert "weight-norm 106.67 ± 1.3 (n = 3) (behind)" in found.value
    assert "initial_g=one-except-windows 92.50 ± 1 (n = 3) (ahead)" in found.value
    for data in ("mnist", "cifar10"):
        write_bounds(tmp_path, vae, "standard", [90.0, 91.0, 92.0], data=data)
        write_bounds(tmp_path, vae, "weight-norm", [86.0, 86.1, 86.05], data=data)
    write_scores(tmp_path, "standard", [100.0, 101.0])
    write_scores(tmp_path, "weight-norm", [120.0, 121.5])
    found = other_experiments(context)
    assert found.verdict == "holds qualitatively", found.value
    assert "weight-norm 86.05 ± 0.05 (n = 3) (ahead, ahead in variance)" in found.value
    # Other games are reported and do not count: the paper's best scores differ in both directions.
    write_scores(tmp_path, "standard", [9.0, 9.5], game="breakout")
    write_scores(tmp_path, "weight-norm", [1.0, 1.25], game="breakout")
    found = other_experiments(context)
    assert "breakout, best score: standard 9.25" in found.value
    assert found.verdict == "holds qualitatively"


def test_variance_between_seeds_counts(tmp_path):
    write_bounds(tmp_path, vae, "standard", [90.0, 90.01, 90.02])
    write_bounds(tmp_path, vae, "weight-norm", [70.0, 80.0, 75.0])
    found = other_experiments(Context(runs=tmp_path))
    assert "(ahead, behind in variance)" in found.value
    assert found.verdict == "not shown"


def test_seeds_that_never_reach_standards_best_are_counted_apart(tmp_path):
    write_bounds(tmp_path, draw, "standard", [100.0, 100.0])  # 103, 102, 101, 100
    write_bounds(tmp_path, draw, "weight-norm", [98.0, 104.0])  # 101, 100, … and never
    found = other_experiments(Context(runs=tmp_path))
    assert "weight-norm with 1 of 2 seeds, after 2 of 4 epochs" in found.value
    write_scores(tmp_path, "standard", [100.0])  # best in the second epoch
    write_scores(tmp_path, "weight-norm", [90.0])
    found = other_experiments(Context(runs=tmp_path))
    assert "weight-norm with none of 1 seeds" in found.value


def test_the_papers_size_is_that_of_all_settings(tmp_path):
    errors = dict.fromkeys(("weight-norm", "batch-norm", "mean-only-batch-norm"), 0.2)
    errors |= {"standard": 0.3, "weight-norm-mean-only": 0.1}

    def write(root, **config):
        for how, error in errors.items():
            for seed in (1, 2, 3):
                found = {"train_error": error + seed / 1000, "test_error": error}
                write_run(root, classify, how, seed, found, **config)
        return cifar10_ordering(Context(runs=root)).verdict

    paper = scientific_fields(classify.PRESETS["paper"])
    paper = {k: v for k, v in paper.items() if k not in ("parameterization", "seed")}
    assert write(tmp_path / "paper", **paper) == "holds"
    assert write(tmp_path / "short", **{**paper, "epochs": 1}) == "holds qualitatively"
    assert write(tmp_path / "digits", data="digits") == "not measured"  # of CIFAR-10


def test_a_curve_with_a_gap_has_no_mean(tmp_path):
    write_run(tmp_path, draw, "standard", 1, {}, [{BOUND: 1.0}, {BOUND: 3.0}])
    write_run(tmp_path, draw, "standard", 2, {}, [{BOUND: 1.0}, {BOUND: None}])
    (runs,) = comparable_runs(tmp_path, draw)
    assert runs.results(over_training(BOUND)) == {"standard": {1: 2.0, 2: math.inf}}


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
    assert after.results(final_value(BOUND)) == before.results(final_value(BOUND))


def test_runs_of_the_demo_are_not_compared(tmp_path):
    write_run(tmp_path, classify, "standard", 1, {"train_error": 0.1})
    path = next(tmp_path.rglob("config.json"))
    path.write_text(path.read_text().replace('"preset": "cpu"', '"preset": "demo"'))
    assert comparable_runs(tmp_path, classify) == []


def test_the_papers_size_is_judged_even_with_fewer_runs(tmp_path):
    paper = scientific_fields(classify.PRESETS["paper"])
    paper = {k: v for k, v in paper.items() if k not in ("parameterization", "seed")}
    context = Context(runs=tmp_path)
    for i, how in enumerate(Parameterization):
        assert cifar10_ordering(context).verdict == "not measured"  # until all five are there
        for seed in (1, 2, 3):
            write_run(tmp_path, classify, how, seed, {"train_error": i, "test_error": i})
        for seed in (1, 2):
            write_run(tmp_path, classify, how, seed, {"train_error": i, "test_error": i}, **paper)
    assert cifar10_ordering(context).n == 10


def test_every_game_is_at_the_papers_size(tmp_path):
    paper = scientific_fields(dqn.PRESETS["paper"])
    paper = {k: v for k, v in paper.items() if k not in ("parameterization", "seed")}
    write_run(tmp_path, dqn, "standard", 1, {"best_score": 1.0}, **{**paper, "game": "breakout"})
    (runs,) = comparable_runs(tmp_path, dqn)
    assert runs.at_scale


def test_the_learning_rate_with_the_highest_score_is_compared(tmp_path):
    for rate, score in ((0.001, 5.0), (0.003, 9.0), (0.01, 7.0)):
        write_run(tmp_path, dqn, "standard", 1, {"best_score": score}, learning_rate=rate)
    (runs,) = comparable_runs(tmp_path, dqn)
    assert runs.results(final_value("best_score")) == {"standard": {1: 9.0}}


def test_the_smallest_learning_rate_is_compared_if_all_diverged(tmp_path):
    for rate in (0.003, 0.001, 0.01):
        write_run(tmp_path, classify, "standard", 1, {"train_error": None}, learning_rate=rate)
    (runs,) = comparable_runs(tmp_path, classify)
    assert [run.config["learning_rate"] for run in runs.by_parameterization["standard"]] == [0.001]


def test_seeds_that_standard_lacks_are_not_counted(tmp_path):
    write_bounds(tmp_path, draw, "standard", [100.0])
    write_bounds(tmp_path, draw, "weight-norm", [98.0, 97.0])
    found = other_experiments(Context(runs=tmp_path))
    assert "weight-norm with 1 of 1 seeds" in found.value
