"""How it is measured: turns, samples, intervals, goals, bytes, the machine's limits."""

import math

import pytest
import torch
from torch import nn

from weightnorm.lab.benchmarks.benchmark import Case, Setting, Work
from weightnorm.lab.benchmarks.goals import (
    AtMost,
    CopiesAtMost,
    ExtraAtMost,
    GrowthAtMost,
    RelativelyAtMost,
)
from weightnorm.lab.benchmarks.interleaved import interleaved
from weightnorm.lab.benchmarks.measurement import measure
from weightnorm.lab.benchmarks.peak_memory import peak_bytes
from weightnorm.lab.benchmarks.roofline import Roofline, RooflineProbe, operations
from weightnorm.lab.benchmarks.statistics import Interval, interval, medians

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when told."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_turns_are_taken_and_the_first_round_is_not_counted(clock):
    order = []

    def step(name, durations):
        def run():
            order.append(name)
            clock[0] += durations.pop(0)

        return run

    peers = {
        "a": step("a", [100.0, 1.0, 2.0, 9.0, 4.0, 4.0, 4.0, 4.0, 4.0]),
        "b": step("b", [100.0, *[5.0] * 8]),
    }
    assert interleaved(peers, rounds=8) == {"a": [1, 2, 9, *[4] * 5], "b": [5] * 8}
    turns = list(zip(order[::2], order[1::2], strict=True))
    assert all(set(turn) == {"a", "b"} for turn in turns)
    assert len(set(turns)) == 2  # neither is always the first


def test_short_calls_are_repeated_and_averaged(clock):
    count = {"a": 0, "b": 0}

    def tick(name, seconds):
        def run():
            count[name] += 1
            clock[0] += seconds

        return run

    taken = interleaved({"a": tick("a", 0.001), "b": tick("b", 0.005)}, rounds=2, least=0.01)
    assert count == {"a": 1 + 2 * 10, "b": 1 + 2 * 2}
    assert taken == {"a": pytest.approx([0.001] * 2), "b": pytest.approx([0.005] * 2)}


def test_a_call_may_say_itself_what_it_took():
    told = iter([0.001, 0.002, 0.003])  # short, but not repeated
    assert interleaved({"a": lambda: next(told)}, rounds=2, least=1.0) == {"a": [0.002, 0.003]}


def test_rounds_are_resampled_whole():
    """A round that was slow for both is no evidence that one is slower."""
    slow = [1.0, 1.0, 1.0, 9.0, 9.0, 9.0]
    middle = medians({"a": slow, "b": [2 * x for x in slow]})
    assert interval(middle["b"] / middle["a"]) == Interval(2.0, 2.0, 2.0)


def test_the_pace_of_a_round_is_taken_out():
    """Not always the same peer's rounds are hit; without pairing, b would seem faster than a."""
    pace = [1.0, 1.0, 1.0, 8.0, 8.0, 8.0, 8.0]
    noise = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0]
    middle = medians({"a": pace, "b": [1.25 * p * n for p, n in zip(pace, noise, strict=True)]})
    ratio = interval(middle["b"] / middle["a"])
    assert ratio.middle == pytest.approx(1.25, rel=0.05)
    assert 1.0 < ratio.low <= ratio.high < 1.5
    assert interval(middle["a"]).middle == pytest.approx(8.0, rel=0.1)  # in seconds, still


def test_short_rounds_are_more(clock):
    def tick():
        clock[0] += 0.5

    assert len(interleaved({"a": tick, "b": tick}, rounds=3, budget=5.0)["a"]) == 5
    assert len(interleaved({"a": tick, "b": tick}, rounds=3, budget=500.0)["a"]) == 12
    assert len(interleaved({"a": tick, "b": tick}, rounds=3, budget=0.1)["a"]) == 3


def value(goal, **samples):
    return interval(goal.value(medians({name: [x] * 3 for name, x in samples.items()}))).middle


def test_what_goals_measure():
    assert value(AtMost("a", 1.0, "b"), a=3.0, b=2.0) == 1.5
    extra = ExtraAtMost("a", 0.5, "b", "base")
    assert value(extra, a=1.1, b=1.4, base=1.0) == pytest.approx(0.25)
    assert value(extra, a=1.1, b=1.0, base=1.0) == math.inf  # the other costs nothing
    assert value(extra, a=1.0, b=0.9, base=1.0) == 0
    relative = RelativelyAtMost(("a", "b"), 1.0, ("c", "d"))
    assert value(relative, a=3.0, b=2.0, c=6.0, d=5.0) == pytest.approx(1.25)
    copies = CopiesAtMost("a", 1.0, "b", 100, "weights")
    assert value(copies, a=350.0, b=200.0) == 1.5


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_growth_is_a_power(power):
    sizes = {n: (f"n{n}", "base") for n in (1, 4, 16)}
    taken = {f"n{n}": 5.0 + 3.0 * n**power for n in sizes}
    goal = GrowthAtMost("cost", 1.0, "n", sizes)
    assert value(goal, base=5.0, **taken) == pytest.approx(power, abs=1e-6)


def test_a_case_is_measured_against_its_goals_and_the_limit():
    case = Case(
        "name",
        {"plain": lambda: 2.0, "ours": lambda: 3.0},
        base="plain",
        goals=(AtMost("ours", 1.0, "plain"), AtMost("ours", 2.0, "plain")),
        work=Work(12.0, "matrix", "ours"),
    )
    found = measure(case, Setting(CPU, quick=True, rounds=4), Roofline(1.0, 8.0, 1.0))
    assert found.ratios == {"ours": Interval(1.5, 1.5, 1.5)}
    assert [goal.verdict for goal in found.goals] == ["missed", "met"]
    assert found.share.value == pytest.approx(0.5)  # 12 in 3 seconds, where 8 a second is possible
    assert len(found.samples["ours"]) == 4


def test_bytes_held_at_once():
    def work():
        a = torch.empty(1000)
        b = a + 1
        del a
        return b + 1  # two are held at any time

    assert peak_bytes(work, CPU) == pytest.approx(8000, abs=300)


def test_operations_of_a_call():
    layer, x = nn.Linear(3, 5), torch.randn(7, 3)
    assert operations(lambda: layer(x).sum().backward()) == 2 * (2 * 3 * 5 * 7)  # no ∇x


def test_the_probe_counts_what_it_does():
    probe = RooflineProbe(Setting(CPU, quick=True, rounds=1))
    calls, amounts = probe.calls(), probe.amounts()
    assert amounts["matrix"] == operations(calls["matrix"])
    assert amounts["convolution"] == operations(calls["convolution"])
    assert amounts["memory"] == 8 * probe.source.numel()
    limits = probe.measure()
    assert min(limits.memory, limits.matrix, limits.convolution) > 0
