"""Times several calls in alternation, so that changes of the machine's speed affect all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import torch

Call = Callable[[], float | None]
"""A call to be timed. If it returns a number, that is the measurement instead of its time."""
Samples = dict[str, list[float]]
"""Call → one measurement per round."""
OnRound = Callable[[int, int], None]


def interleaved(
    calls: Mapping[str, Call],
    rounds: int,
    *,
    shortest: float = 0.0,
    most: int | None = None,
    seconds: float = 0.0,
    done: Callable[[Samples], bool] = lambda samples: True,
    on_round: OnRound = lambda round, rounds: None,
) -> Samples:
    """Measure every call once per round, in an order that is shuffled in each round.

    Calls are warmed up first. Shuffling averages out what a call leaves in the caches for the next.

    Args:
        rounds: number of rounds; measuring continues beyond it until `done`.
        shortest: a call that takes less than this many seconds is repeated for that long; the mean
            is one measurement.
        most: upper limit for the number of rounds; by default `rounds`.
        seconds: time after which no round beyond `rounds` is started.
        done: whether the samples suffice; called after `rounds` rounds and then whenever their
            number has grown by a quarter.
        on_round: called after each round with the number of rounds done and expected.
    """
    began = time.perf_counter()
    repeats = {name: _repeats(call, shortest) for name, call in calls.items()}
    samples: Samples = {name: [] for name in calls}
    order, shuffled = list(calls), random.Random(0)
    most, check = max(rounds, most or rounds), rounds
    for count in range(1, most + 1):
        shuffled.shuffle(order)
        for name in order:
            samples[name].append(_measure(calls[name], repeats[name]))
        on_round(count, max(check, count))
        if count >= rounds and time.perf_counter() - began >= seconds:
            break
        if count == check:
            if done(samples):
                break
            check = min(most, count + max(1, count // 4))
    return samples


def _repeats(call: Call, shortest: float) -> int:
    """Warm a call up; return how often it has to be repeated to take this many seconds."""
    began = time.perf_counter()
    value = call()
    _synchronize()
    # A first call may take many times as long as the later ones.
    if value is not None or time.perf_counter() - began >= 20 * shortest:
        return 1
    repeats = 1
    while (taken := repeats * _measure(call, repeats)) < shortest / 2:
        repeats *= 4
    return max(1, round(shortest * repeats / taken))


def _measure(call: Call, repeats: int) -> float:
    _synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        if (value := call()) is not None:
            return value
    _synchronize()
    return (time.perf_counter() - began) / repeats


def seconds(call: Callable[[], object]) -> float:
    """Time one call."""

    def run() -> None:
        call()

    return _measure(run, 1)


def _synchronize() -> None:
    """Wait for the GPU, if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
