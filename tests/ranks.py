"""Run a function on several gloo ranks, one process each, and collect the results."""

import os
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(world: int, fn, *args, seconds: float = 1200, lost=()):
    """Return [fn(rank, *args) for each rank], each run in its own process with a gloo group.

    Ranks in `lost` are expected to die or hang; their result is None.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        workers = [
            context.Process(target=_work, args=(rank, world, folder, fn, args))
            for rank in range(world)
        ]
        for worker in workers:
            worker.start()
        for rank, worker in enumerate(workers):
            worker.join(0 if rank in lost else seconds)
        alive = [rank for rank, worker in enumerate(workers) if worker.is_alive()]
        for worker in workers:
            worker.kill()
        failures = [p.read_text() for p in sorted(Path(folder).glob("error-*"))]
        assert set(alive) <= set(lost), f"ranks {alive} hung; {failures}"
        assert not failures, "\n".join(failures)
        return [
            None if rank in lost else torch.load(f"{folder}/result-{rank}", weights_only=True)
            for rank in range(world)
        ]


def _work(rank: int, world: int, folder: str, fn, args) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
        )
        torch.save(fn(rank, *args), f"{folder}/result-{rank}")
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error-{rank}").write_text(traceback.format_exc())
        raise


def messages_of(acts) -> dict[str, str]:
    """Name → message of the ValueError that each function raises."""
    messages = {}
    for name, act in acts.items():
        with pytest.raises(ValueError) as error:
            act()
        messages[name] = str(error.value)
    return messages
