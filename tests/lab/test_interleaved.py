"""The interleaved timer, with a fake clock."""

import pytest

from weightnorm.lab.interleaved import interleaved


@pytest.fixture
def clock(monkeypatch):
    """A clock that is advanced by hand."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_order_is_shuffled_and_the_first_round_is_not_counted(clock):
    order = []

    def step(name, durations):
        def run():
            order.append(name)
            clock[0] += durations.pop(0)

        return run

    calls = {
        "a": step("a", [100.0, 1.0, 2.0, 9.0, 4.0, 4.0, 4.0, 4.0, 4.0]),
        "b": step("b", [100.0, *[5.0] * 8]),
    }
    assert interleaved(calls, rounds=8) == {"a": [1, 2, 9, *[4] * 5], "b": [5] * 8}
    rounds = list(zip(order[::2], order[1::2], strict=True))
    assert all(set(names) == {"a", "b"} for names in rounds)
    assert len(set(rounds)) == 2  # neither is always first


def test_short_calls_are_repeated_and_averaged(clock):
    count = {"a": 0, "b": 0}

    def tick(name, seconds):
        def run():
            count[name] += 1
            clock[0] += seconds

        return run

    samples = interleaved({"a": tick("a", 0.001), "b": tick("b", 0.005)}, rounds=2, shortest=0.01)
    # One to warm up, some to find the number of repeats, two rounds.
    assert count == {"a": 1 + (1 + 4 + 16) + 2 * 10, "b": 1 + 1 + 2 * 2}
    assert samples == {"a": pytest.approx([0.001] * 2), "b": pytest.approx([0.005] * 2)}


def test_slow_first_call_does_not_reduce_the_repeats(clock):
    durations = [0.1, *[0.001] * 99]

    def call():
        clock[0] += durations.pop(0)

    interleaved({"a": call}, rounds=1, shortest=0.01)
    assert len(durations) == 100 - 1 - (1 + 4 + 16) - 10


def test_a_call_may_return_its_measurement():
    values = iter([0.001, 0.002, 0.003])  # short, but not repeated
    samples = interleaved({"a": lambda: next(values)}, rounds=2, shortest=1.0)
    assert samples == {"a": [0.002, 0.003]}


def test_rounds_are_added_until_done_or_out_of_time(clock):
    def tick():
        clock[0] += 1.0

    def rounds(**limits):
        return len(interleaved({"a": tick}, rounds=4, **limits)["a"])

    def enough(samples):
        return len(samples["a"]) >= 6

    assert rounds(done=lambda samples: False) == 4  # no time for more
    assert rounds(seconds=100.0, most=50, done=enough) == 6
    assert rounds(seconds=100.0, most=5, done=enough) == 5
    assert rounds(seconds=8.0, most=50, done=lambda samples: False) == 7  # one is the warm-up
    assert rounds(seconds=100.0, most=50) == 4  # done at once


def test_every_round_is_reported():
    reported = []
    interleaved({"a": lambda: 1.0}, rounds=3, on_round=lambda *counts: reported.append(counts))
    assert reported == [(1, 3), (2, 3), (3, 3)]
