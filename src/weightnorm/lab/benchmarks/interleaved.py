"""Several things measured side by side: they take turns, so that whatever else the machine does
meets all of them."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

import torch

MORE = 4
Step = Callable[[], None]
Call = Callable[[], float | None]
"""Does the work. What it returns is the measurement; None: how long it took."""


def interleaved(
    peers: Mapping[str, Call], rounds: int, least: float = 0.0, budget: float = 0.0
) -> dict[str, list[float]]:
    """What each peer took in each round.

    The first round is not counted. In each round the order is another: what a peer leaves in the
    caches, or does to the clock rate, meets all others alike. A call shorter than `least` seconds
    is repeated for that long, and the mean of the calls is one measurement. Where rounds are short
    there are more of them, up to MORE times as many, as far as `budget` seconds go.
    """
    first = {name: _measured(call, 1) for name, call in peers.items()}
    calls = {name: max(1, round(least / max(taken, 1e-6))) for name, taken in first.items()}
    taken: dict[str, list[float]] = {name: [] for name in peers}
    a_round = sum(max(seconds, least) for seconds in first.values())
    rounds = min(max(rounds, int(budget / max(a_round, 1e-6))), MORE * rounds)
    order, chance = list(peers), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for name in order:
            taken[name].append(_measured(peers[name], calls[name]))
    return taken


def _measured(call: Call, calls: int) -> float:
    _wait()
    began = time.perf_counter()
    for _ in range(calls):
        if (told := call()) is not None:
            return told  # once is enough
    _wait()
    return (time.perf_counter() - began) / calls


def _wait() -> None:
    """Let the device finish what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def apart(makers: dict[str, Callable[[], Step]]) -> Iterator[dict[str, Step]]:
    """Steps that are made, and then called from here, each in a process of its own: what one does
    to its process, such as how it allocates, is not the others'."""
    with ExitStack() as open_pipes:
        yield {name: _elsewhere(make, open_pipes) for name, make in makers.items()}


def _elsewhere(make: Callable[[], Step], open_pipes: ExitStack) -> Step:
    context = multiprocessing.get_context("spawn")
    pipe, its_end = context.Pipe()
    process = context.Process(target=_serve, args=(make, its_end), daemon=True)
    process.start()
    its_end.close()
    open_pipes.callback(process.join)
    open_pipes.enter_context(pipe)  # closed, it ends the process
    pipe.recv()

    def step() -> None:
        pipe.send(None)
        pipe.recv()

    return step


def _serve(make: Callable[[], Step], pipe: Connection) -> None:
    step = make()
    pipe.send(None)
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        step()
        pipe.send(None)
