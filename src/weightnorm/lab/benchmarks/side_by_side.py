"""Several things timed side by side."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from statistics import median

Step = Callable[[], None]


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


def interleaved(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """The median seconds of each, all taking turns; the first round is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            taken[name].append(time.perf_counter() - began)
    return {name: median(times[1:]) for name, times in taken.items()}
