"""Run a function on several gloo ranks, one process each, and collect the results.

Tests that do so are in the xdist group "clusters", so that there is one pool of processes.
"""

import multiprocessing.connection
import os
import tempfile
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


class Worker:
    """A process that runs one function after the other, each as a rank of a new group."""

    def __init__(self):
        context = mp.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()


POOL: list[Worker] = []
"""Workers that are kept for the next call: starting one imports torch, which takes seconds."""


def on_ranks(world: int, fn, *args, seconds: float = 1200, lost=()):
    """Return [fn(rank, *args) for each rank], each run in its own process with a gloo group.

    Ranks in `lost` are expected to die or hang; their result is None.
    """
    POOL.extend(Worker() for _ in range(world - len(POOL)))
    with tempfile.TemporaryDirectory() as folder:
        for rank, worker in enumerate(POOL[:world]):
            worker.connection.send((rank, world, folder, fn, args))
        waiting = {POOL[rank].connection: rank for rank in range(world) if rank not in lost}
        failure = None
        while waiting and not failure:
            ready = multiprocessing.connection.wait(waiting, seconds)
            failure = None if ready else f"ranks {[*waiting.values()]} hung"
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    failure = connection.recv()
                except EOFError:
                    failure = f"rank {rank} died"
        for rank in range(world)[::-1] if failure else sorted(lost, reverse=True):
            POOL.pop(rank).process.kill()
        assert not failure, failure
        return [
            None if rank in lost else torch.load(f"{folder}/result-{rank}", weights_only=True)
            for rank in range(world)
        ]


def _work(connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        try:
            rank, world, folder, fn, args = connection.recv()
        except EOFError:  # the tests have ended
            return
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
            )
            torch.save(fn(rank, *args), f"{folder}/result-{rank}")
            dist.destroy_process_group()
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())


def messages_of(acts) -> dict[str, str]:
    """Name → message of the ValueError that each function raises."""
    messages = {}
    for name, act in acts.items():
        with pytest.raises(ValueError) as error:
            act()
        messages[name] = str(error.value)
    return messages
