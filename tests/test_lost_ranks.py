"""A rank that dies or hangs raises an error on the others in time; the model is restored."""

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


def center(group, act):
    first, second = (mean_only_batch_norm(nn.Linear(4, 4), group=group) for _ in range(2))
    model = nn.Sequential(first, Trap(act, in_backward=True), second)
    model(torch.randn(10, 4)).square().sum().backward()


MINUTE, SECONDS = 60.0, 4.0
CASES = [
    # what all ranks run, signal to the lost rank, timeout of the group
    (initialize, signal.SIGKILL, MINUTE),
    (center, signal.SIGKILL, MINUTE),
    (initialize, signal.SIGSTOP, SECONDS),
]
WORLD = 2 + len(CASES)


def members(case):
    """Return the two ranks that survive and the one that is lost in this case."""
    return [0, 1, 2 + case]


def survive(rank):
    groups = [
        dist.new_group(members(i), timeout=timedelta(seconds=timeout))
        for i, (_, _, timeout) in enumerate(CASES)
    ]
    seconds = []
    for i, (run, signal_number, _) in enumerate(CASES):
        if rank not in members(i):
            continue
        act = partial(os.kill, os.getpid(), signal_number) if rank == members(i)[-1] else int
        dist.barrier(groups[i])  # all ranks are running
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            run(groups[i], act)
        seconds.append(time.monotonic() - began)
    return seconds


@pytest.mark.xdist_group("clusters")
def test_other_ranks_raise_in_time():
    lost = [members(i)[-1] for i in range(len(CASES))]
    survivors = [result for result in on_ranks(WORLD, survive, lost=lost) if result is not None]
    assert len(survivors) == 2
    for seconds in survivors:
        for (_, _, timeout), waited in zip(CASES, seconds, strict=True):
            assert waited < (30 if timeout == MINUTE else timeout + 30)
