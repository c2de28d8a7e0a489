"""A rank that dies or hangs is an error on the others, soon, that says what they waited for."""

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
from weightnorm.distributed import RankLost

pytestmark = pytest.mark.xdist_group("lost-ranks")  # which share their processes


class Trap(nn.Module):
    """The rank sends itself a signal when an input, or a gradient, comes by."""

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
        for name, value in model.state_dict().items():  # put back as it was
            assert torch.equal(value, before[name])


def centre(group, act, in_backward=False):
    first, second = (mean_only_batch_norm(nn.Linear(4, 4), group=group) for _ in range(2))
    model = nn.Sequential(first, Trap(act, in_backward), second)
    model(torch.randn(10, 4)).square().sum().backward()


def centre_gradient(group, act):
    centre(group, act, in_backward=True)


MINUTE, MOMENT = 60.0, 8.0
CASES = [
    # what all do together, how one is lost, the group's timeout, what the others waited for
    (initialize, signal.SIGKILL, MINUTE, "the moments of layer '3' in data_dependent_init"),
    (centre, signal.SIGKILL, MINUTE, "the mean of mean-only batch norm"),
    (centre_gradient, signal.SIGKILL, MINUTE, "the gradient of the mean of mean-only batch norm"),
    (initialize, signal.SIGSTOP, MOMENT, "the moments of layer '3' in data_dependent_init"),
]
WORLD = 2 + len(CASES)


def members(case):
    """The two that stay, and the one that this case loses."""
    return [0, 1, 2 + case]


def left_behind(rank):
    groups = [
        dist.new_group(members(i), timeout=timedelta(seconds=timeout))
        for i, (_, _, timeout, _) in enumerate(CASES)
    ]
    said = []
    for i, (together, which, _, _) in enumerate(CASES):
        if rank not in members(i):
            continue
        act = partial(os.kill, os.getpid(), which) if rank == members(i)[-1] else int
        dist.barrier(groups[i])  # all are up
        began = time.monotonic()
        with pytest.raises(RankLost) as error:
            together(groups[i], act)
        said.append((str(error.value), time.monotonic() - began))
    return said


@pytest.fixture(scope="module")
def survivors():
    results = on_ranks(WORLD, left_behind, lost=[members(i)[-1] for i in range(len(CASES))])
    return [result for result in results if result is not None]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_others_get_an_error_in_time(survivors, case):
    _, _, timeout, what = CASES[case]
    assert len(survivors) == 2
    for rank, said in enumerate(survivors):
        message, seconds = said[case]
        assert f"rank {rank} of 3 failed waiting for {what} (" in message
        assert "another rank died, hangs, or runs different code" in message
        assert seconds < (30 if timeout == MINUTE else timeout + 30)
