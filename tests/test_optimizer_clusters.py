"""The optimizer form on several ranks: separate optimizers, Muon, every way of sharding a unit."""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ranks import on_ranks
from weightnorm import WeightNormOptimizer
from weightnorm.diagnostics import TrainingMonitor, check

pytestmark = pytest.mark.xdist_group("clusters")  # which share their processes


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(3, 5, 3), nn.ConvTranspose1d(5, 4, 3, groups=1), nn.Flatten(), nn.Linear(32, 6)
    ).to(dtype)


def advance(model, optimizer, steps):
    for i in steps:
        for p in model.parameters():
            p.grad = torch.cos(3 * p.detach() + i)
        optimizer.step()
        optimizer.zero_grad()


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def outcome(model, optimizer):
    logged = {}
    with TrainingMonitor(model, optimizer, lambda *row: logged.update([row[:2]])) as monitor:
        monitor.measure()
    return {
        "logged": logged,
        "findings": len(check(model, optimizer)),
        "weights": {name: full(p) for name, p in model.state_dict().items()},
        "g": {name: full(both.g) for name, both in optimizer.parts().items()},
        "v": {name: full(both.v) for name, both in optimizer.parts().items()},
    }


adam = partial(torch.optim.Adam, lr=0.01)
FORMS = {
    "separate": lambda m: WeightNormOptimizer(
        m, torch.optim.SGD, lr=0.1, momentum=0.9, lengths=adam
    ),
    "muon": lambda m: WeightNormOptimizer(
        m, torch.optim.Muon, lr=0.02, lengths=adam, where=lambda n, _: n != "1.weight"
    ),
    "retracted": lambda m: WeightNormOptimizer(
        m, torch.optim.SGD, lr=0.1, dim=None, train_g=False, retract=True, normalize_update=True
    ),
    "decay on w": lambda m: WeightNormOptimizer(
        m, torch.optim.AdamW, lr=0.01, weight_decay_on="w", scale="log"
    ),
    "bfloat16": lambda m: WeightNormOptimizer(m, torch.optim.SGD, lr=0.01, momentum=0.9),
}
DTYPES = {"bfloat16": torch.bfloat16, "muon": torch.float32}


def made(form, wrap=lambda model: model):
    model = wrap(network(DTYPES.get(form, torch.float64)))
    return model, FORMS[form](model)


def sharded(model):
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def forms(rank, folder):
    """Four steps; and two, saved, and two more after loading."""
    results, world = {}, dist.get_world_size()
    for form in FORMS:
        pair = made(form, sharded)
        advance(*pair, range(4))
        results[form] = outcome(*pair)
        for flat in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            place = f"{folder}/{form}-{flat}"
            if world == 2:
                first = made(form, sharded)
                advance(*first, range(2))
                dcp.save(
                    dict(enumerate(get_state_dict(*first, options=options))), checkpoint_id=place
                )
            other = made(form, sharded)
            advance(*other, range(7, 9))  # to be overwritten
            states = dict(enumerate(get_state_dict(*other, options=options)))
            dcp.load(states, checkpoint_id=place)
            set_state_dict(
                *other, model_state_dict=states[0], optim_state_dict=states[1], options=options
            )
            advance(*other, range(2, 4))
            results[f"{form} resumed {flat}"] = outcome(*other)
    return results


LAYERS = {
    "linear": lambda: nn.Linear(6, 5),
    "transposed": lambda: nn.ConvTranspose1d(6, 4, 3),
    "grouped": lambda: nn.ConvTranspose1d(6, 6, 3, groups=3),
}
PLACED = [  # layer, placement, dim, g
    ("linear", Shard(0), "auto", None),
    ("linear", Shard(1), "auto", 0.5),
    ("linear", Shard(1), None, None),
    ("linear", Replicate(), "auto", 0.5),
    ("transposed", Shard(0), "auto", None),
    ("transposed", Shard(0), None, 0.5),
    ("transposed", Shard(1), "auto", 0.5),
    ("grouped", Shard(1), "auto", 0.5),
    ("grouped", Replicate(), "auto", None),
]


def placements(rank, folder):
    """Weights cut along any axis, on a mesh of one or two dimensions."""
    world, results = dist.get_world_size(), {}
    meshes = [init_device_mesh("cpu", (world,))]
    if world == 4:
        meshes.append(init_device_mesh("cpu", (2, 2)))
    for mesh, (name, axis, dim, g) in itertools.product(meshes, PLACED):
        places = [axis, Shard(0)][: mesh.ndim]
        if name == "grouped" and Shard(0) in places:
            continue  # refused
        torch.manual_seed(0)
        plain, spread = (LAYERS[name]().double() for _ in range(2))
        if g is not None:  # every unit gets a random direction, on every rank the same
            nn.init.zeros_(plain.weight)
        for key, p in list(plain.named_parameters()):
            here = places if key == "weight" else [Replicate()] * mesh.ndim
            placed = distribute_tensor(p.detach().clone(), mesh, here)
            spread.register_parameter(key, nn.Parameter(placed))
        pair = []
        for layer in (plain, spread):
            optimizer = WeightNormOptimizer(
                layer, torch.optim.SGD, lr=0.1, momentum=0.9, dim=dim, g=g
            )
            advance(layer, optimizer, range(3))
            pair.append(full(layer.weight))
        results[f"{name} {places} {dim} {g}"] = tuple(pair)
    return results


def refused(rank, folder):
    model = nn.MultiheadAttention(8, 2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError) as error:
        WeightNormOptimizer(model, torch.optim.Muon, lr=0.1, lengths=adam)
    return str(error.value)


def copied(rank, folder):
    """Two steps of a layer with a sharded weight and of a copy, each with its optimizer; and the
    copy of a sharded model's state."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    layer = nn.Linear(8, 4, bias=False).double()
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    pair = layer, FORMS["separate"](layer)
    advance(*pair, range(2))
    pairs = [pair, copy.deepcopy(pair)]
    for one in pairs:
        advance(*one, range(2, 4))
    model, optimizer = made("separate", sharded)
    advance(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())["state"]
    v = optimizer.parts()["0.weight"].v
    norms = full(state[0]["v_norm"]), full(v).flatten(1).norm(dim=1).view(-1, 1, 1)
    return [full(layer.weight) for layer, _ in pairs], norms


def other_start(rank, folder):
    """Weights that differ between ranks until DistributedDataParallel takes those of rank 0."""
    torch.manual_seed(rank)
    model = nn.Linear(4, 3).double()
    optimizer = WeightNormOptimizer(model, torch.optim.Adam, lr=0.01)
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(3):
        parallel(torch.ones(2, 4, dtype=torch.double)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach(), optimizer.parts()["weight"].v


def everything(rank, folder):
    parts = (forms, placements, refused, copied, other_start)
    return tuple(part(rank, folder) for part in parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def on_two(folder):
    return on_ranks(2, everything, folder)


@pytest.fixture(scope="module")
def on_four(folder, on_two):
    return on_ranks(4, everything, folder)


@pytest.mark.parametrize("world", ["on_two", "on_four"])
@pytest.mark.parametrize("form", FORMS)
def test_sharded_forms_follow_one_process(request, form, world):
    pair = made(form)
    advance(*pair, range(4))
    expected = outcome(*pair)
    tolerance = {"bfloat16": 0.02, "muon": 0.02}.get(form, 1e-10)
    for results, *_ in request.getfixturevalue(world):
        for name in (form, f"{form} resumed False", f"{form} resumed True"):
            torch.testing.assert_close(results[name], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("world", ["on_two", "on_four"])
def test_units_on_several_ranks(request, world):
    for _, results, *_ in request.getfixturevalue(world):
        for name, (expected, got) in results.items():
            torch.testing.assert_close(got, expected, msg=lambda said, n=name: f"{n}: {said}")


def test_stacked_matrices_that_are_sharded_are_refused(on_two):
    message = "in_proj_weight stacks 3 matrices and is sharded"
    assert all(message in said for _, _, said, *_ in on_two)


@pytest.mark.parametrize("world", ["on_two", "on_four"])
def test_copies_of_sharded_weights_and_states_are_equal(request, world):
    for _, _, _, (weights, norms), _ in request.getfixturevalue(world):
        torch.testing.assert_close(*weights, rtol=0, atol=0)
        torch.testing.assert_close(*norms)


@pytest.mark.parametrize("world", ["on_two", "on_four"])
def test_all_ranks_start_from_the_weights_of_rank_0(request, world):
    first, *others = (results for *_, results in request.getfixturevalue(world))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
