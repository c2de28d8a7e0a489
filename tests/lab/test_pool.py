"""Worker processes: state, results, errors, end."""

import os
from pathlib import Path

import pytest
import torch

from weightnorm.lab.errors import RunError
from weightnorm.lab.pool import Pool, Worker, one_thread


def append(state, x):
    state.append(x)
    return os.getpid(), list(state)


def divide(state, x):
    return state[0] / x


def exit_now(state):
    os._exit(5)


def threads(state):
    return torch.get_num_threads()


def fail():
    raise FileNotFoundError("absent")


@pytest.fixture
def worker():
    made = Worker(list, (1,))
    yield made
    made.close()


def test_a_worker_keeps_its_state_in_another_process(worker):
    first, second = worker.call(append, 2), worker.call(append, 3)
    assert second == (first[0], [1, 2, 3])
    assert first[0] != os.getpid()


def test_errors_are_raised_here_and_the_worker_survives(capfd):
    worker = Worker(list, (1,))
    try:
        with pytest.raises(ZeroDivisionError):
            worker.call(divide, 0)
        assert worker.call(divide, 2) == 0.5
    finally:
        worker.close()
    assert "in divide" in capfd.readouterr().err  # the traceback


def test_a_worker_that_ends_is_an_error(worker):
    with pytest.raises(RunError, match="exit code 5"):
        worker.call(exit_now)


def test_a_state_that_cannot_be_made_is_an_error(capfd):
    worker = Worker(fail)
    try:
        with pytest.raises(FileNotFoundError, match="absent"):
            worker.call(append, 1)
    finally:
        worker.close()


def test_closing_ends_the_process(worker):
    pid, _ = worker.call(append, 0)
    assert Path(f"/proc/{pid}").exists()
    worker.close()
    assert not Path(f"/proc/{pid}").exists()


def test_a_pool_shares_calls_between_its_workers():
    pool = Pool(2, one_thread, list)
    try:
        found = dict(pool.map(append, [(x,) for x in range(6)]))
        assert sorted(found) == list(range(6))
        assert all(found[x][1][-1] == x for x in found)
        assert len({pid for pid, _ in found.values()}) == 2
        assert dict(pool.map(threads, [(), ()])) == {0: 1, 1: 1}
    finally:
        pool.close()
