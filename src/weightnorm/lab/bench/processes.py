"""Peers in processes of their own, called from here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from weightnorm.lab.interleaved import Call
from weightnorm.lab.pool import Worker
from weightnorm.lab.runs.ranks import Ranks

Step = Callable[[], None]


@contextmanager
def in_processes(makers: Mapping[str, Callable[[], Step]]) -> Iterator[dict[str, Call]]:
    """Make each step in a process of its own, so that memory allocation of one does not affect the
    others; yield functions that run them."""
    with ExitStack() as stack:
        workers = {name: Worker(make) for name, make in makers.items()}
        for worker in workers.values():
            stack.callback(worker.close)
        for worker in workers.values():
            worker.call(_ready)
        yield {name: partial(worker.call, _run) for name, worker in workers.items()}


@contextmanager
def on_ranks(world: int, make: Callable[..., Any], *arguments: Any) -> Iterator[list[Worker]]:
    """Start the ranks of a gloo process group, one thread each; ``make(ranks, *arguments)`` is the
    state of each."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        workers = []
        for rank in range(world):
            workers.append(Worker(_join, folder, rank, world, make, *arguments))
            stack.callback(workers[-1].close)
        call_all(workers, _ready)
        yield workers


def call_all(workers: list[Worker], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function on all workers at the same time; their results."""
    for worker in workers:
        worker.submit(function, *arguments)
    return [worker.result() for worker in workers]


def _join(folder: str, rank: int, world: int, make: Callable[..., Any], *arguments: Any) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    return make(Ranks(rank, world), *arguments)


def _ready(state: Any) -> None:
    """Does nothing; returns once the state is made."""


def _run(step: Step) -> None:
    step()
