"""A rank that dies or hangs raises RankLost on the others; other errors stay what they are."""

import copy
import os
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranks import on_ranks
from weightnorm import data_dependent_init, mean_only_batch_norm, weight_norm_model
from weightnorm._distributed import RankLost, collective

pytestmark = pytest.mark.xdist_group("lost-ranks")  # they share their processes


class Trap(nn.Module):
    """Calls `act` in the forward pass, or in the backward pass."""

    def __init__(self, act, in_backward=False):
        super().__init__()
        self.act, self.in_backward = act, in_backward

    def forward(self, x):
        if self.in_backward:
            x.register_hook(lambda grad: self.act() or None)
        else:
            self.act()
        return x


def initialize(group, act):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Trap(act), nn.Linear(6, 2))
    weight_norm_model(model)
    before = copy.deepcopy(model.state_dict())
    try:
        data_dependent_init(model, torch.randn(10, 4), group=group)
    finally:
        for name, value in model.state_dict().items():  # restored
            assert torch.equal(value, before[name])


def center(group, act, in_backward=False):
    first, second = (mean_only_batch_norm(nn.Linear(4, 4), group=group) for _ in range(2))
    model = nn.Sequential(first, Trap(act, in_backward), second)
    model(torch.randn(10, 4)).square().sum().backward()


def center_gradient(group, act):
    center(group, act, in_backward=True)


MINUTE, SECONDS = 60.0, 8.0
CASES = [
    # what all ranks run, signal to the lost rank, timeout of the group, what the others wait for
    (initialize, signal.SIGKILL, MINUTE, "the moments of layer '3' in data_dependent_init"),
    (center, signal.SIGKILL, MINUTE, "the mean of mean-only batch norm"),
    (center_gradient, signal.SIGKILL, MINUTE, "the gradient of the mean of mean-only batch norm"),
    (initialize, signal.SIGSTOP, SECONDS, "the moments of layer '3' in data_dependent_init"),
]
WORLD = 2 + len(CASES)


def members(case):
    """Return the two ranks that survive and the one that is lost in this case."""
    return [0, 1, 2 + case]


def survive(rank):
    groups = [
        dist.new_group(members(i), timeout=timedelta(seconds=timeout))
        for i, (_, _, timeout, _) in enumerate(CASES)
    ]
    messages = []
    for i, (run, signal_number, _, _) in enumerate(CASES):
        if rank not in members(i):
            continue
        act = partial(os.kill, os.getpid(), signal_number) if rank == members(i)[-1] else int
        dist.barrier(groups[i])  # all ranks are running
        began = time.monotonic()
        with pytest.raises(RankLost) as error:
            run(groups[i], act)
        messages.append((str(error.value), time.monotonic() - began))
    return messages


@pytest.fixture(scope="module")
def survivors():
    results = on_ranks(WORLD, survive, lost=[members(i)[-1] for i in range(len(CASES))])
    return [result for result in results if result is not None]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_other_ranks_raise_in_time(survivors, case):
    _, _, timeout, what = CASES[case]
    assert len(survivors) == 2
    for rank, messages in enumerate(survivors):
        message, seconds = messages[case]
        assert f"rank {rank} of 3 failed waiting for {what} (" in message
        assert "another rank died, hangs, or runs different code" in message
        assert seconds < (30 if timeout == MINUTE else timeout + 30)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


COMMUNICATION = [
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset"),
    dist.DistBackendError("NCCL error: remote process exited"),
    dist.DistNetworkError("connection refused"),
    dist.DistStoreError("wait timeout after 300000ms"),
]
OTHER = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    NotImplementedError("no kernel for this backend"),
    RecursionError("maximum recursion depth exceeded"),
    ValueError("invalid argument"),
]


def name(error):
    return f"{type(error).__name__}-{str(error)[:12]}"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("error", COMMUNICATION, ids=name)
def test_communication_errors_become_rank_lost(error):
    expected = r"rank 0 of 1 failed waiting for the mean"
    with pytest.raises(RankLost, match=expected) as raised, collective("the mean"):
        raise error
    assert raised.value.__cause__ is error


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("error", OTHER, ids=name)
def test_other_errors_are_raised_unchanged(error):
    with pytest.raises(type(error)) as raised, collective("the mean"):
        raise error
    assert raised.value is error


@pytest.mark.usefixtures("one_rank")
def test_out_of_memory_is_not_rank_lost():
    with pytest.raises(RuntimeError, match="memory") as raised, collective("the mean"):
        dist.all_reduce(torch.empty(2**60))
    assert not isinstance(raised.value, RankLost)
