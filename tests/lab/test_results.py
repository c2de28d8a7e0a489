"""Data frames of runs: best rates, settings, curves and paired differences."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from weightnorm.lab.records import RunRecord, find_records
from weightnorm.lab.results import (
    Comparison,
    best_learning_rate,
    epoch_frame,
    folder_label,
    mean_and_std,
    number,
    run_frame,
    setting_labels,
)

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def record(*errors, result=None, first=1, method="a", **config):
    rows = [{"epoch": first + i, "error": error} for i, error in enumerate(errors)]
    return RunRecord(Path("run"), "classify", "cpu", {"method": method} | config, [], rows, result)


def done(error, **config):
    return record(error, result={"error": error}, **config)


def diverged(error=None, **config):
    return replace(done(error, **config), diverged={"epoch": 1, "step": 1, "message": "nan"})


def comparison(*records, **how):
    return Comparison(run_frame(records), "error", **how)


def test_every_record_of_the_results_is_read():
    records, problems = find_records(RESULTS)
    assert not problems
    assert len(records) > 100
    runs = run_frame([r for r in records if r.experiment not in ("bench", "claims")])
    assert runs["seed"].ge(0).all()
    assert runs["learning_rate"].gt(0).all()
    finished = runs[runs["state"] == "finished"]
    judged = ["final_test_error", "final_test_negative_elbo", "final_best_score"]
    judged += ["final_test_bits_per_byte"]
    assert (finished[judged].notna().sum(axis=1) == 1).all()
    assert set(epoch_frame(runs)["run"]) == set(runs.index)


def test_final_values_are_of_the_result_then_of_the_last_epoch():
    frame = run_frame(
        [
            record(0.9, 0.4, result={"error": 0.3}),
            record(0.9, 0.4, result={}),
            record(0.9, result={"error": None}),
            record(0.9, 0.4),  # not finished
            diverged(0.4),
        ]
    )
    assert frame["final_error"].tolist() == pytest.approx([0.3, 0.4, *[math.nan] * 3], nan_ok=True)
    assert frame["state"].tolist() == [*["finished"] * 3, "unfinished", "diverged"]


@pytest.mark.parametrize("value", [None, "0.3", True, math.nan, math.inf, [1]])
def test_what_is_not_a_finite_number_counts_as_missing(value):
    assert math.isnan(number(value))
    assert mean_and_std([0.25, number(value)]) == "0.25 (n = 1 of 2)"


# — the best learning rate —


@pytest.mark.parametrize(
    ("results", "best"),
    [
        ({0.1: []}, None),
        ({0.1: [None]}, None),
        ({0.1: [0.4], 0.01: [0.3]}, 0.01),
        ({0.1: [0.1, 0.9], 0.01: [0.4, 0.4]}, 0.01),  # the lowest mean, not the lowest run
        ({0.1: [0.1, None], 0.01: [0.4, 0.5]}, 0.01),  # a seed diverged
        ({0.1: [0.1, None], 0.01: [None, None]}, 0.1),
        ({0.1: [0.1, None], 0.01: [0.2, None]}, 0.1),  # at every rate
        ({0.1: [0.3], 0.01: [0.3]}, 0.01),  # equal: the smaller rate
        ({0.1: [0.3, 0.3], 0.01: [0.3]}, 0.1),  # equal: more runs
        ({0.1: [0.2, 0.3, 0.3], 0.01: [0.25]}, 0.1),  # by the seed that both have
        # A diverged rate does not narrow the comparison of the others.
        ({0.1: [0.2, 0.6], 0.3: [0.3, 0.3], 1.0: [5.0, None]}, 0.3),
    ],
)
def test_lowest_mean_without_divergence(results, best):
    def chosen(sign):
        runs = [
            (diverged if x is None else done)(x and sign * x, learning_rate=rate, seed=seed)
            for rate, values in results.items()
            for seed, x in enumerate(values)
        ]
        frame = run_frame([*runs, record(learning_rate=1e-9)])  # unfinished: not counted
        return best_learning_rate(frame, "error", highest=sign < 0)

    assert chosen(1) == chosen(-1) == best


def test_rates_without_a_common_seed_are_compared_by_their_own_means():
    runs = [done(0.2, learning_rate=0.1, seed=1), done(0.1, learning_rate=0.01, seed=2)]
    assert comparison(*runs).best == {"a": 0.01}


def test_while_nothing_has_finished_the_rate_with_most_epochs_is_shown():
    runs = [record(learning_rate=0.1), record(0.9, 0.8, learning_rate=0.2)]
    assert comparison(*runs).best == {"a": 0.2}
    assert comparison(*runs, done(0.99, learning_rate=0.3)).best == {"a": 0.3}


# — settings —


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("runs/classify/cpu/weight-norm/lr-0.003/seed-1", "cpu"),
        ("runs/classify/cpu+epochs=3/weight-norm/lr-0.003/seed-1", "cpu+epochs=3"),
        ("classify/cpu+x=1/classify/cpu+x=2/weight-norm", "cpu+x=2"),
        ("classify/work/classify/cpu+x=1/weight-norm", "cpu+x=1"),
        ("elsewhere/seed-1", "cpu"),
        ("runs/classify/cpu2/weight-norm", "cpu"),
    ],
)
def test_the_label_is_the_folder_below_the_experiment(folder, expected):
    assert folder_label(RunRecord(Path(folder), "classify", "cpu", {})) == expected


def test_fields_that_differ_within_a_label_are_appended():
    def labels(records, **fields):
        return setting_labels(run_frame(records), **fields).tolist()

    runs = [done(0.1, epochs=i, seed=seed) for i, seed in ((1, 1), (6, 2), (6, 3))]
    assert labels(runs, method_fields=["method"]) == ["cpu+epochs=1"] + ["cpu+epochs=6"] * 2
    assert labels(runs, free_fields=["epochs"]) == ["cpu"] * 3
    older = done(0.2, seed=4)  # from before the field existed
    assert labels([older, *runs]) == ["cpu"] * 4
    moved = replace(runs[0], folder=Path("classify/cpu+a-b=1,epochs=1/x"))
    assert labels([moved], method_fields=["a_b"]) == ["cpu+epochs=1"]


# — numbers over runs —


def test_a_curve_is_mean_and_std_at_each_epoch_with_gaps():
    def curve(*records):
        one = comparison(*records)
        return one.curve("error", one.runs)

    found, n = curve(record(0.9, 0.4), record(0.7, 0.2))
    assert (n, found.index.tolist()) == (2, [1, 2])
    assert found["mean"].tolist() == pytest.approx([0.8, 0.3])
    assert found["std"].tolist() == pytest.approx([np.std([0.9, 0.7], ddof=1)] * 2)
    found, _ = curve(record(0.9, 0.4, 0.2), record(0.7, None))  # dropped out
    assert found["mean"].tolist() == pytest.approx([0.8, math.nan, math.nan], nan_ok=True)
    found, n = curve(record(0.9, None, 0.2), record(None, None, None))  # never has it
    assert (n, found["mean"].tolist()) == (1, [0.9, 0.2])
    found, _ = curve(record(0.9, 0.4), record(0.2, first=2))  # by epoch, not by row
    assert found["mean"].tolist() == pytest.approx([math.nan, 0.3], nan_ok=True)
    assert curve(record())[1] == 0


def test_parts_of_training():
    one = comparison(record(*range(8), result={}, seed=1))
    means = {part: one.values(f"error:{part}", one.runs)[1] for part in (
        "first quarter", "all epochs", "last quarter", "last epoch", "first half", "last five"
    )}  # fmt: skip
    assert [*means.values()] == [0.5, 3.5, 6.5, 7, 1.5, 5]
    empty = comparison(record(result={}, seed=1))
    assert math.isnan(empty.values("error:last five", empty.runs)[1])


def test_differences_are_those_of_a_paired_t_test():
    random = np.random.default_rng(1)
    ours, theirs = (dict(enumerate(random.normal(size=6))) for _ in range(2))
    one = comparison(
        *(done(x, seed=seed) for seed, x in ours.items()),
        *(done(x, seed=seed, method="b") for seed, x in {**theirs, 9: 0.0}.items()),
    )
    interval, n = one.difference("error", "a", "b")
    a, b = ([x[seed] for seed in range(6)] for x in (ours, theirs))
    expected = scipy.stats.ttest_rel(a, b).confidence_interval(0.95)
    assert n == 6
    assert interval.value == pytest.approx(np.mean(a) - np.mean(b))
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high))


def test_a_diverged_run_has_no_difference_and_sets_no_common_value():
    runs = [record(0.9, 0.4, result={}), record(0.8, 0.3, result={}, method="b")]
    lost = replace(record(0.95, result={}, seed=2, method="b"), diverged={"epoch": 2})
    one = comparison(*runs, lost)
    target, needed = one.epochs_to_common("error")
    assert target == 0.4
    assert needed == {"a": [2], "b": pytest.approx([2, math.nan], nan_ok=True)}
    assert comparison(runs[0]).epochs_to_common("error")[1] == {}
    both = comparison(done(0.1, seed=1), diverged(0.1, seed=1, method="b"))
    change, n = both.difference("error", "b", "a")
    assert (math.isnan(change.value), n) == (True, 1)
    assert both.difference("error", "b", "c") is None
    assert comparison(runs[0], done(0.1, method="b", seed=7)).difference("error", "a", "b") is None


def test_mean_and_std_equal_numpy():
    x = np.random.default_rng(0).uniform(1, 2, size=5)
    assert mean_and_std(x, 10, 3) == f"{10 * x.mean():.3f} ± {10 * x.std(ddof=1):.3f}"
    assert mean_and_std([]) == "—"
