"""Worker processes: results, state, errors, end."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from weightnorm.lab.errors import RunError
from weightnorm.lab.pool import call_state, worker_processes


def counter(path):
    """A state that appends its process to a file at each call."""

    def call():
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")

    return call


def test_workers_share_calls_and_end_with_the_context(tmp_path):
    path = tmp_path / "processes"
    with worker_processes(2, partial(counter, path)) as pool:
        assert [*pool.map(divmod, range(4), [3] * 4)] == [divmod(x, 3) for x in range(4)]
        assert pool.submit(torch.get_num_threads).result() == 1
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 1, 0).result()
        for _ in range(3):
            pool.submit(call_state).result()
    pids = path.read_text().split()
    assert len(pids) == 3
    assert str(os.getpid()) not in pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_worker_that_dies_is_an_error():
    with pytest.raises(RunError, match="a worker process ended"), worker_processes(1) as pool:
        pool.submit(os._exit, 5).result()
