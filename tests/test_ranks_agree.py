"""Decisions and numbers that all ranks must agree on: refusals, second derivatives, placements."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from ranks import messages_of, on_ranks
from weightnorm import (
    WeightNormOptimizer,
    data_dependent_init,
    weight_norm_model,
)
from weightnorm._distributed import sum_over_ranks

pytestmark = pytest.mark.xdist_group("clusters")  # one pool of workers

WORLD = 2


def gradient_of_a_penalty(rank):
    """d/dx of |d/dx (Σ over ranks of x³)²|², which the backward pass must sum over ranks twice."""
    x = torch.tensor([1.0 + rank], dtype=torch.float64, requires_grad=True)
    total = sum_over_ranks(x**3, dist.group.WORLD)
    (first,) = torch.autograd.grad(total.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return second


def test_second_derivatives_of_a_sum_over_ranks():
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    loss = WORLD * (x**3).sum().square()  # the ranks' losses are added up
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    torch.testing.assert_close(torch.cat(on_ranks(WORLD, gradient_of_a_penalty)), second)


def compiled_wrapper(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    weight_norm_model(model)
    torch.manual_seed(rank)
    wrapped = torch.compile(DistributedDataParallel(model), backend="eager")
    data_dependent_init(wrapped, torch.randn(20, 4))
    return {name: x.clone() for name, x in model.state_dict().items()}


def test_a_compiled_wrapper_is_initialized_on_the_batches_of_all_ranks():
    first, second = on_ranks(WORLD, compiled_wrapper)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def strided(weight):
    """The rows of a weight as FSDP2 of a tensor-parallel layer has them."""
    rows = weight.detach().chunk(WORLD)[dist.get_rank()].clone()
    mesh = init_device_mesh("cpu", (WORLD,))
    placed = DTensor.from_local(rows, mesh, [_StridedShard(0, split_factor=1)], run_check=False)
    return nn.Parameter(placed)


def three_steps(rank, place=strided):
    torch.manual_seed(0)
    model = nn.Linear(3, 4, bias=False).double()
    model.weight = place(model.weight)
    optimizer = WeightNormOptimizer(model, torch.optim.Adam, lr=0.1)
    for _ in range(3):
        model.weight.grad = torch.cos(model.weight.detach())
        optimizer.step()
    return getattr(model.weight, "_local_tensor", model.weight).detach().clone()


def test_strided_shards_hold_whole_units():
    whole = three_steps(0, place=lambda weight: weight)
    torch.testing.assert_close(torch.cat(on_ranks(WORLD, three_steps)), whole)


def sharded(normalize):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ConvTranspose1d(4, 6, 3))
    if normalize:
        weight_norm_model(model)
    fully_shard(model)
    return model


def loads_into_a_sharded_model(rank):
    """The weights after loading plain ones into a normalized model."""
    plain, model = sharded(normalize=False), sharded(normalize=True)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(3)
    model.load_state_dict(plain.state_dict())
    x = torch.ones(2, 4, 4)
    return [plain(x).detach(), model(x).detach()]


def test_a_transposed_convolution_is_loaded_into_a_sharded_model():
    for plain, normalized in on_ranks(WORLD, loads_into_a_sharded_model):
        torch.testing.assert_close(plain, normalized)


def refuses_what_one_rank_has(rank):
    """The error for a weight that is infinite on rank 0, after which it has not changed."""
    state, model = sharded(normalize=False).state_dict(), sharded(normalize=True)
    if rank == 0:
        state["0.weight"].to_local()[0, 0] = float("inf")
    before = {name: x.full_tensor() for name, x in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="not finite") as error:
        model.load_state_dict(state)
    after = {name: x.full_tensor() for name, x in model.state_dict().items()}
    assert all(torch.equal(before[name], after[name]) for name in before if "0.param" in name)
    return str(error.value)


def test_a_weight_that_is_not_finite_on_one_rank_is_refused_on_all():
    for message in on_ranks(WORLD, refuses_what_one_rank_has):
        assert "0.weight" in message


def refusals(rank):
    torch.manual_seed(0)
    acts = {
        "DDP": lambda: weight_norm_model(DistributedDataParallel(nn.Linear(3, 2))),
        "FSDP1": lambda: WeightNormOptimizer(
            FullyShardedDataParallel(
                nn.Linear(3, 2), device_id=torch.device("cpu"), use_orig_params=True
            ),
            torch.optim.Adam,
            dim=None,
        ),
        "groups": lambda: WeightNormOptimizer(grouped(), torch.optim.Adam),
    }
    return messages_of(acts)


def grouped():
    layer = nn.ConvTranspose1d(4, 4, 3, groups=2, bias=False)
    layer.weight = strided(layer.weight)
    return layer


def test_refusals():
    for messages in on_ranks(WORLD, refusals):
        assert "call weight_norm_model first, then wrap the model" in messages["DDP"]
        assert "fully_shard instead" in messages["FSDP1"]
        assert "groups along axis 0, which is sharded" in messages["groups"]
