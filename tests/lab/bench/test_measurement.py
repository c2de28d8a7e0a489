"""Estimators, goals, noise, peak memory, limits of the machine."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from weightnorm.lab.bench.benchmark import Case, Settings, Summary, Work
from weightnorm.lab.bench.goals import (
    AtMost,
    CopiesAtMost,
    ExtraAtMost,
    GrowthAtMost,
    RelativelyAtMost,
)
from weightnorm.lab.bench.machine import instruction_sets
from weightnorm.lab.bench.measurement import is_precise, measure
from weightnorm.lab.bench.peak_memory import peak_bytes
from weightnorm.lab.bench.roofline import Roofline, RooflineProbe, operations
from weightnorm.lab.bench.statistics import Rounds, estimate, ratio_interval

CPU = torch.device("cpu")


def test_ratios_are_paired_by_round():
    """A round that was slow for both does not change the ratio."""
    slow = [1.0, 1.0, 1.0, 9.0, 9.0, 9.0]
    ratio = ratio_interval({"a": slow, "b": [2 * x for x in slow]}, "b", "a")
    assert ratio == pytest.approx((2.0, 2.0, 2.0))


def test_outliers_are_trimmed():
    a = [1.0] * 20
    b = [1.25] * 16 + [9.0, 9.0, 0.1, 0.1]
    ratio = ratio_interval({"a": a, "b": b}, "b", "a")
    assert ratio.value == pytest.approx(1.25)
    assert ratio.half_width < 0.05


def test_estimator_is_unbiased_and_precise_on_noisy_rounds():
    """Heavy-tailed noise with drift of the machine's speed, a true ratio of 1.05."""
    rng = np.random.default_rng(0)
    speed = 1 + rng.exponential(0.5, 200)
    a, b = (x * speed * (1 + rng.exponential(0.05, 200)) for x in (1.0, 1.05))
    ratio = ratio_interval({"a": list(a), "b": list(b)}, "b", "a")
    assert ratio.low < 1.05 < ratio.high
    assert ratio.half_width < 0.02


def value(goal, **samples):
    repeated = {name: [x] * 3 for name, x in samples.items()}
    return estimate(repeated, goal.peers, goal.value).value


def test_values_of_goals():
    assert value(AtMost("a", 1.0, "b"), a=3.0, b=2.0) == pytest.approx(1.5)
    extra = ExtraAtMost("a", 0.5, "b", "base")
    assert value(extra, a=1.1, b=1.4, base=1.0) == pytest.approx(0.25)
    assert value(extra, a=1.1, b=1.0, base=1.0) == math.inf  # the other has no extra cost
    assert value(extra, a=1.0, b=0.9, base=1.0) == 0
    relative = RelativelyAtMost(("a", "b"), 1.0, ("c", "d"))
    assert value(relative, a=3.0, b=2.0, c=6.0, d=5.0) == pytest.approx(1.25)
    copies = CopiesAtMost("a", 1.0, "b", 100, "weights")
    assert value(copies, a=350.0, b=200.0) == pytest.approx(1.5)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_growth_is_an_exponent(power):
    sizes = {n: (f"n{n}", "base") for n in (1, 4, 16)}
    samples = {f"n{n}": 5.0 + 3.0 * n**power for n in sizes}
    goal = GrowthAtMost("cost", 1.0, "n", sizes)
    assert value(goal, base=5.0, **samples) == pytest.approx(power, abs=1e-6)


def test_goals_are_vectorized_over_resamples():
    rounds = Rounds({"a": np.full((7, 3), 2.0), "b": np.ones((7, 3)), "c": np.full((7, 3), 1.5)})
    for goal in (
        AtMost("a", 1.0, "b"),
        ExtraAtMost("a", 1.0, "c", "b"),
        CopiesAtMost("a", 1.0, "b", 4, ""),
        RelativelyAtMost(("a", "b"), 1.0, ("c", "b")),
        GrowthAtMost("", 1.0, "", {1: ("b", None), 2: ("a", None)}),
    ):
        assert goal.value(rounds).shape == (7,)


def constant(values):
    """A call that returns its measurements one after the other."""
    remaining = iter(values)
    return lambda: next(remaining)


def test_measurement_of_a_case():
    line = Summary("work", "ours", goal=1)
    case = Case(
        "name",
        {"plain": lambda: 2.0, "ours": lambda: 3.0},
        base="plain",
        goals=(AtMost("ours", 1.0, "plain"), AtMost("ours", 2.0, "plain")),
        work=Work(12.0, "matrix", "ours"),
        summary=(line,),
        at_least_base=("ours",),
    )
    found = measure(case, Settings(CPU, quick=True, rounds=4), Roofline(1.0, 8.0, 1.0))
    ours = found.results["ours"]
    assert (ours.median, ours.value, ours.noise) == (3.0, pytest.approx(1.5), False)
    assert [goal.verdict for goal in found.goals] == ["missed", "met"]
    assert [goal.met for goal in found.goals] == [False, True]
    assert found.share.value == pytest.approx(0.5)  # 12 in 3 s; the limit is 8 per s
    assert found.rounds == len(found.samples["ours"]) == 4
    assert found.row()["summary"][0]["goal"] == 1


def test_faster_with_more_work_is_noise():
    def measured(ours):
        case = Case(
            "name",
            {"plain": lambda: 1.0, "ours": lambda: ours},
            base="plain",
            goals=(AtMost("ours", 1.01, "plain"),),
            at_least_base=("ours",),
        )
        return measure(case, Settings(CPU, quick=True, rounds=4), Roofline(1.0, 1.0, 1.0))

    assert measured(0.88).results["ours"].noise
    assert measured(0.88).goals[0].verdict == "within noise"
    assert not measured(0.99).goals[0].met  # the interval excludes 1
    assert not measured(1.0).results["ours"].noise
    assert measured(1.0).goals[0].met


def test_imprecise_and_faster_with_more_work_is_noise():
    case = Case(
        "name",
        {"plain": lambda: 1.0, "ours": constant([1.0, 0.7, 0.8, 0.9, 1.3])},
        base="plain",
        at_least_base=("ours",),
    )
    found = measure(case, Settings(CPU, quick=True, rounds=4), Roofline(1.0, 1.0, 1.0))
    assert found.results["ours"].high > 1
    assert found.results["ours"].noise


def test_rounds_are_added_until_ratios_are_precise():
    rng = np.random.default_rng(0)
    noisy = 1 + 0.1 * rng.standard_normal(1000)
    case = Case(
        "name",
        {"plain": lambda: 1.0, "ours": constant(noisy)},
        base="plain",
        goals=(AtMost("ours", 1.01, "plain"),),
        summary=(Summary("work", "ours"),),
    )
    settings = Settings(CPU, rounds=5, seconds=60.0)
    found = measure(case, settings, Roofline(1.0, 1.0, 1.0))
    assert 5 < found.rounds < settings.most
    assert is_precise(found.samples, "plain", settings.precision)
    assert not is_precise({n: x[:5] for n, x in found.samples.items()}, "plain", 0.02)


def test_peak_memory():
    def work():
        a = torch.empty(1000)
        b = a + 1
        del a
        return b + 1  # two are allocated at any time

    assert peak_bytes(work, CPU) == pytest.approx(8000, abs=300)


def test_operations_of_a_call():
    layer, x = nn.Linear(3, 5), torch.randn(7, 3)
    assert operations(lambda: layer(x).sum().backward()) == 2 * (2 * 3 * 5 * 7)  # no ∇x


def test_roofline_counts_its_own_work():
    probe = RooflineProbe(Settings(CPU, quick=True, rounds=1))
    calls, amounts = probe.calls(), probe.amounts()
    assert amounts["matrix"] == operations(calls["matrix"])
    assert amounts["convolution"] == operations(calls["convolution"])
    assert amounts["memory"] == 8 * probe.source.numel()
    limits = probe.measure()
    assert min(limits.memory, limits.matrix, limits.convolution) > 0


def test_instruction_sets(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(
        "model name\t: CPU\nflags\t\t: fpu avx2 avx512f avx512_bf16 aes fma\nflags\t: x\n"
    )
    assert instruction_sets(path) == ["avx2", "avx512_bf16", "avx512f", "fma"]
    assert instruction_sets(tmp_path / "absent") == []
