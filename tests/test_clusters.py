"""Training on several ranks (DDP, FSDP2, tensor parallel) follows the trajectory of one process."""

import re
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ranks import messages_of, on_ranks
from weightnorm import (
    WeightNormOptimizer,
    convert_state_dict,
    data_dependent_init,
    diagnostics,
    folded,
    init_,
    mean_only_batch_norm,
    normalized_weights,
    remove_weight_norm,
    weight_norm,
    weight_norm_model,
)

pytestmark = pytest.mark.xdist_group("clusters")  # one pool of workers

DOCS = Path(__file__).parents[1] / "docs" / "frameworks.md"
STEPS, BATCH = 3, 8
FORMS = ("module", "optimizer")
SETUPS = {
    2: ["ddp", "ddp-accumulated", "ddp-recomputed", "fsdp", "fsdp-accumulated"],
    4: ["ddp", "fsdp-recomputed"],  # some ranks have no examples, or no rows of a weight
}


class Block(nn.Module):
    """A layer and its nonlinearity, optionally recomputed in the backward pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.recompute = layer, False

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)

    def body(self, x):
        out = self.layer(x)
        return torch.tanh(out[0] if isinstance(out, tuple) else out)


def network(group=None):
    """Units along either axis, groups, gates, and weights with fewer rows than there are ranks."""
    torch.manual_seed(0)
    layers = [
        nn.Conv1d(3, 5, 3),
        nn.ConvTranspose1d(5, 6, 3),
        nn.ConvTranspose1d(6, 3, 1),
        mean_only_batch_norm(nn.Conv1d(3, 6, 3), group=group),
        nn.ConvTranspose1d(6, 4, 3, groups=2),
        nn.LSTM(8, 3, batch_first=True),
        nn.Flatten(),
        nn.Linear(12, 1),
        nn.Linear(1, 3),
    ]
    return nn.Sequential(*map(Block, layers)).double()


def sharded(model):
    """Shard every block, and for LSTM and linear layers also the layer itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        if isinstance(block.layer, (nn.LSTM, nn.Linear)):
            fully_shard(block.layer, mesh=mesh)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def from_meta(model):
    """Shard the model on the meta device, then call reset_parameters on every module."""
    sharded(model.to("meta")).to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(full(p).isfinite().all() for p in model.parameters())
    return model


def build(form, wrap=lambda model: model):
    """Return the wrapped model and its optimizer."""
    model = network(dist.group.WORLD if dist.is_initialized() else None)
    if form == "module":
        weight_norm_model(model)
    model = wrap(model)
    if form == "module":
        return model, torch.optim.Adam(model.parameters(), lr=0.01)
    # Groups along a sharded axis are refused.
    return model, WeightNormOptimizer(
        model, torch.optim.Adam, lr=0.01, where=lambda name, _: "4.layer" not in name
    )


def examples(step):
    generator = torch.Generator().manual_seed(step)
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
    return draw(BATCH, 3, 8), draw(BATCH, 3)


def shares(rows, world):
    """Return the number of examples of each rank: unequal, and 0 on some."""
    return {1: [rows], 2: [rows - 3, 3], 4: [rows - 4, 3, 1, 0]}[world]


def train(model, optimizer, rank=0, world=1, pieces=1, steps=range(STEPS)):
    """Train on the mean loss of the global batch, of which this rank has its share."""
    for step in steps:
        optimizer.zero_grad()
        for i, (x, y) in enumerate(zip(*(e.chunk(pieces) for e in examples(step)), strict=True)):
            last = i == pieces - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
                x, y = (t.split(shares(len(t), world))[rank] for t in (x, y))
                loss = F.mse_loss(model(x), y, reduction="sum") / BATCH
                (loss * world).backward()  # the ranks' gradients are averaged
        optimizer.step()


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def outcome(form, model, optimizer):
    """Return every parameter and buffer, and v and g from the model or from the optimizer."""
    parts = optimizer.parts() if form == "optimizer" else normalized_weights(model)
    plain = lambda name: name.removeprefix("module.")  # noqa: E731
    return {
        "state": {plain(name): full(p) for name, p in model.state_dict().items()},
        "parts": {plain(name): tuple(map(full, both)) for name, both in parts.items()},
    }


def trajectories(rank, world):
    results = {}
    for form in FORMS:
        for setup in SETUPS[world]:
            wrap = sharded if setup.startswith("fsdp") else DistributedDataParallel
            model, optimizer = build(form, wrap)
            for block in getattr(model, "module", model):
                block.recompute = setup.endswith("recomputed")
            pieces = 2 if setup.endswith("accumulated") else 1
            train(model, optimizer, rank, world, pieces)
            results[f"{form} {setup}"] = outcome(form, model, optimizer)
    return results


def resumed(rank, world, folder):
    """Train half of the steps on two ranks; resume in a new model on two, and on four ranks."""
    results, whole = {}, StateDictOptions(full_state_dict=True)
    for form in FORMS:
        other = build(form, from_meta)
        if world == 2:
            trained = build(form, sharded)
            train(*trained, rank, world, steps=range(STEPS // 2))
            dcp.save(dict(enumerate(get_state_dict(*trained))), checkpoint_id=f"{folder}/{form}")
            load(other, get_state_dict(*trained, options=whole), whole)
        else:
            shards = dict(enumerate(get_state_dict(*other)))
            dcp.load(shards, checkpoint_id=f"{folder}/{form}")
            load(other, shards.values())
        train(*other, rank, world, steps=range(STEPS // 2, STEPS))
        results[f"{form} resumed"] = outcome(form, *other)
    return results


def load(pair, states, options=None):
    model, optimizer = states
    set_state_dict(*pair, model_state_dict=model, optim_state_dict=optimizer, options=options)


def read_between_passes(rank):
    """Return pairs (got, expected) of weights and probes of a sharded model between passes."""
    model, twin = network(dist.group.WORLD), network()
    causal = torch.ones(5, 3, 3, dtype=torch.float64).tril()
    for each in (model, twin):
        weight_norm(each[0].layer, mask=causal)
        weight_norm_model(each)
    sharded(model)
    init_(model[1].layer, nn.init.ones_)
    init_(twin[1].layer, nn.init.ones_)
    layers = [(a.layer, b.layer) for a, b in zip(model, twin, strict=True)]
    layers = [(a, b) for a, b in layers if hasattr(b, "weight")]
    pairs = {f"weight {i}": (a.weight, b.weight) for i, (a, b) in enumerate(layers)}
    for probe in (diagnostics.v_norms, diagnostics.effective_step):
        mine, theirs = probe(model), probe(twin)
        pairs.update({f"{probe.__name__} {name}": (mine[name], theirs[name]) for name in theirs})
    state = convert_state_dict(twin.state_dict(), to="folded")
    mine = convert_state_dict({k: full(v) for k, v in model.state_dict().items()}, to="folded")
    pairs.update({f"folded {name}": (mine[name], value) for name, value in state.items()})
    return {name: tuple(map(full, pair)) for name, pair in pairs.items()}


MESSAGES = {
    "weight_norm": "Conv1d.weight is sharded over ranks already: normalize first, then",
    "weight_norm_model": "normalize first, then fully_shard; or .* WeightNormOptimizer",
    "remove": "FSDPSequential is sharded over ranks: .* gather them with get_model_state",
    "fold": "FSDPParametrizedLinear is sharded over ranks: .* convert_state_dict",
    "initialize": "is sharded over ranks: call data_dependent_init first, then fully_shard",
    "initialize plain": "call data_dependent_init first, then fully_shard",
    "shard inner layer": "call fully_shard on the module around this layer, not on the layer alone",
}


def refusals(rank):
    """Return the messages of operations that must come before sharding."""
    plain, normed = network(), network()
    weight_norm_model(normed)
    sharded(plain), sharded(normed)
    alone = fully_shard(weight_norm(nn.Linear(2, 2)))
    inside = mean_only_batch_norm(nn.Linear(2, 2))
    fully_shard(inside.layer)
    acts = {
        "weight_norm": lambda: weight_norm(plain[0].layer),
        "weight_norm_model": lambda: weight_norm_model(plain),
        "remove": lambda: remove_weight_norm(normed),
        "fold": lambda: folded(alone).__enter__(),
        "initialize": lambda: data_dependent_init(normed, examples(0)[0]),
        "initialize plain": lambda: data_dependent_init(plain, examples(0)[0]),
        "shard inner layer": lambda: inside(torch.randn(4, 2)),
    }
    return messages_of(acts)


def documented(rank):
    """Run the code of docs/frameworks.md on ranks, then an optimizer step."""
    torch.manual_seed(0)
    scope = {}
    with mock.patch.object(dist, "init_process_group"):  # this process is in a group already
        section = DOCS.read_text().partition("\n## Several ranks\n")[2]
        for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            exec(compile(block, DOCS.name, "exec"), scope)
    scope["plain"](scope["batch"]).square().mean().backward()
    scope["optimizer"].step()
    return {name: full(both.v) for name, both in scope["optimizer"].parts().items()}


def trained(rank, world, folder):
    return trajectories(rank, world) | resumed(rank, world, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def on_two(folder):
    return on_ranks(2, trained, 2, folder)


@pytest.fixture(scope="module")
def on_four(folder, on_two):
    return on_ranks(4, trained, 4, folder)


@pytest.fixture(scope="module")
def alone():
    results = {}
    for form in FORMS:
        for pieces in (1, 2):
            model, optimizer = build(form)
            train(model, optimizer, pieces=pieces)
            results[form, pieces] = outcome(form, model, optimizer)
    return results


RUNS = [(2, setup) for setup in (*SETUPS[2], "resumed")]
RUNS += [(4, setup) for setup in (*SETUPS[4], "resumed")]


@pytest.mark.parametrize(("world", "setup"), RUNS)
@pytest.mark.parametrize("form", FORMS)
def test_ranks_follow_one_process(request, alone, form, setup, world):
    expected = alone[form, 2 if setup.endswith("accumulated") else 1]
    for rank in request.getfixturevalue({2: "on_two", 4: "on_four"}[world]):
        torch.testing.assert_close(rank[f"{form} {setup}"], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_weights_and_probes_equal_unsharded_ones(world):
    for pairs in on_ranks(world, read_between_passes):
        assert len(pairs) > 20
        for name, (got, expected) in pairs.items():
            torch.testing.assert_close(got, expected, msg=lambda text, n=name: f"{n}: {text}")


def test_operations_on_a_sharded_model_raise():
    for messages in on_ranks(2, refusals):
        for act, message in MESSAGES.items():
            assert re.search(message, messages[act]), act


def test_documented_code_runs():
    first, second = on_ranks(2, documented)
    assert list(first) == ["0.weight", "2.weight"]
    torch.testing.assert_close(first, second)
