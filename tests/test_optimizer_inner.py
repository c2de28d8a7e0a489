"""The optimizer form around optimizers of other packages, Muon, and a compiler."""

import copy
import importlib
import sys
import types
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import dadaptation
import prodigyopt
import pytest
import schedulefree
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from weightnorm import WeightNormOptimizer, functional, weight_norm_model
from weightnorm.lab.bench.memory import peak_bytes


def timm_optimizer(file, name):
    """An optimizer of timm by its file: importing the package would need torchvision."""
    if find_spec("timm") is None:
        pytest.skip("needs timm: pip install --no-deps timm")
    folder = Path(find_spec("timm").submodule_search_locations[0])
    kept = {k: m for k, m in sys.modules.items() if k == "timm" or k.startswith("timm.")}
    for package, path in (("timm", folder), ("timm.optim", folder / "optim")):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(path)]
    try:
        return getattr(importlib.import_module(f"timm.optim.{file}"), name)
    finally:
        for key in [k for k in sys.modules if k == "timm" or k.startswith("timm.")]:
            del sys.modules[key]
        sys.modules.update(kept)


INNER = {
    "prodigy": lambda: partial(prodigyopt.Prodigy, d0=1e-3),
    "d-adaptation": lambda: partial(dadaptation.DAdaptAdam, d0=1e-3, log_every=0),
    "lamb": lambda: partial(timm_optimizer("lamb", "Lamb"), lr=0.05),
    "adan": lambda: partial(timm_optimizer("adan", "Adan"), lr=0.02),
    "schedule-free": lambda: partial(schedulefree.AdamWScheduleFree, lr=0.05, warmup_steps=3),
    "schedule-free sgd": lambda: partial(schedulefree.SGDScheduleFree, lr=0.3),
}
every_inner = pytest.mark.parametrize("make", INNER.values(), ids=INNER.keys())


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss_of(model):
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (model(x) - x[:, :3].sin()).square().mean()


def train(model, optimizer, steps):
    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()


@every_inner
def test_optimizers_of_other_packages_equal_the_module_form(make):
    """Numbers in parameter groups adapt, and modes are set, as they are without us."""
    inner, plain, normed = make(), network(), network()
    weight_norm_model(normed)
    mine = WeightNormOptimizer(plain, inner, weight_decay_on="parts")
    theirs = inner(normed.parameters())
    start = loss_of(plain).item()
    train(plain, mine, 20)
    train(normed, theirs, 20)
    torch.testing.assert_close(loss_of(plain), loss_of(normed), rtol=1e-9, atol=1e-9)
    assert loss_of(plain) < 0.95 * start
    for name in ("d", "k", "weight_sum", "step"):
        if name in theirs.param_groups[0]:
            assert mine.param_groups[0][name] == pytest.approx(theirs.param_groups[0][name])


@every_inner
def test_optimizers_of_other_packages_resume_exactly(make):
    model = network()
    optimizer = WeightNormOptimizer(model, make())
    train(model, optimizer, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 5)
    other = network()
    resumed = WeightNormOptimizer(other, make())
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(other, resumed, 5)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_modes_do_nothing_for_optimizers_without():
    model = network()
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    before = copy.deepcopy(model.state_dict())
    optimizer.train()
    optimizer.eval()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class Mixed(nn.Module):
    """A convolution, attention and a recurrent layer: matrices of every kind."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.lstm = nn.LSTM(8, 4)
        self.head = nn.Linear(4, 2)


BLOCKS = {
    "conv.weight": 1,
    "attention.in_proj_weight": 3,
    "attention.out_proj.weight": 1,
    "lstm.weight_ih_l0": 4,
    "lstm.weight_hh_l0": 4,
    "head.weight": 1,
}


@pytest.mark.parametrize("channels_last", [False, True])
def test_muon_moves_matrices(channels_last):
    """Convolutions as matrices; stacked q, k, v and gates block by block."""
    torch.manual_seed(0)
    model = Mixed().double()
    twin = copy.deepcopy(model)
    if channels_last:
        model.to(memory_format=torch.channels_last)
    adam = partial(torch.optim.Adam, lr=0.01)
    options = {"lr": 0.1, "weight_decay": 0.0}
    optimizer = WeightNormOptimizer(model, torch.optim.Muon, lengths=adam, **options)
    reference = {}
    for name, blocks in BLOCKS.items():
        weight = twin.get_parameter(name).detach()
        v, g = functional.decompose(weight)
        matrices = [nn.Parameter(m.flatten(1).clone()) for m in v.chunk(blocks)]
        g = nn.Parameter(g)
        reference[name] = matrices, g, torch.optim.Muon(matrices, **options), adam([g])
    for i in range(4):
        generator = torch.Generator().manual_seed(i)
        for name, (matrices, g, *both) in reference.items():
            weight = model.get_parameter(name)
            grad = torch.randn(weight.shape, dtype=torch.float64, generator=generator)
            v = torch.cat([m.detach() for m in matrices]).view(weight.shape)
            grad_v, g.grad = functional.gradients(grad, v=v, g=g.detach())
            for matrix, part in zip(matrices, grad_v.chunk(len(matrices)), strict=True):
                matrix.grad = part.flatten(1).clone()
            for each in both:
                each.step()
            weight.grad = grad.clone()
        optimizer.step()
    for name, (matrices, g, *_) in reference.items():
        weight = model.get_parameter(name).detach()
        v = torch.cat([m.detach() for m in matrices]).view(weight.shape)
        tolerance = 0.05 if channels_last and name == "conv.weight" else 1e-12
        expected = functional.compose(v=v, g=g.detach())
        torch.testing.assert_close(weight, expected, atol=tolerance, rtol=tolerance)


def test_muon_resumes_exactly():
    def build():
        torch.manual_seed(0)
        model = Mixed()
        adam = partial(torch.optim.Adam, lr=0.01)
        return model, WeightNormOptimizer(model, torch.optim.Muon, lr=0.1, lengths=adam)

    def advance(model, optimizer, steps):
        for i in steps:
            for p in model.parameters():
                p.grad = torch.cos(3 * p.detach() + i)
            optimizer.step()

    model, optimizer = build()
    advance(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert "block2.momentum_buffer" in optimizer.state[model.attention.in_proj_weight]
    copied = copy.deepcopy((model, optimizer))
    advance(model, optimizer, range(3, 6))
    other, resumed = build()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for each, its in ((other, resumed), copied):
        advance(each, its, range(3, 6))
        for name, value in model.state_dict().items():
            assert torch.equal(value, each.state_dict()[name]), name


def block():
    """Weights of 1024 inputs, four of them of equal shape."""
    return nn.Sequential(*[nn.Linear(1024, 512) for _ in range(4)], nn.Linear(1024, 1024))


def memory_of(tensors):
    return sum(
        s.nbytes()
        for s in {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}.values()
    )


def test_extra_state_is_below_one_percent_of_the_weights():
    model = block()
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    set_gradients(model)
    optimizer.step()
    seen, found = set(), []

    def walk(thing):
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(thing)
        elif isinstance(thing, dict):
            for key, value in thing.items():
                walk(key)
                walk(value)
        elif isinstance(thing, list | tuple | set):
            for value in thing:
                walk(value)
        elif hasattr(thing, "__dict__"):
            walk(vars(thing))

    walk(vars(optimizer))
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    extra = [t for t in found if t.untyped_storage()._cdata not in weights]
    assert extra
    size = sum(p.numel() * 4 for n, p in model.named_parameters() if n.endswith("weight"))
    assert memory_of(extra) <= 0.01 * size


def set_gradients(model):
    for p in model.parameters():
        p.grad = torch.randn_like(p)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")  # torch 2.11
def test_peak_memory_of_a_step_is_below_the_largest_group_of_equal_shape():
    model = block()
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1, foreach=False)
    gradients = sum(p.numel() for p in model.parameters()) * 4
    largest = max(4 * 1024 * 512, 1024 * 1024) * 4

    def step():  # with the gradients: of memory from before, the profiler does not see the release
        set_gradients(model)
        optimizer.step()

    step()
    assert peak_bytes(step, torch.device("cpu")) - gradients <= largest


def test_gradients_that_are_views_of_a_bucket_are_overwritten_in_place():
    model = nn.Linear(3, 2, bias=False)
    twin = copy.deepcopy(model)
    bucket = torch.randn(12)
    model.weight.grad, twin.weight.grad = bucket[:6].view(2, 3), bucket[:6].view(2, 3).clone()
    before = bucket.clone()
    for each in (model, twin):
        WeightNormOptimizer(each, torch.optim.SGD, lr=0.1).step()
    assert torch.equal(model.weight, twin.weight)
    assert not torch.equal(bucket[:6], before[:6])  # no second copy of the bucket's memory
    assert torch.equal(bucket[6:], before[6:])


FREE = ("detach", "empty", "_local_scalar", "split", "_record")


class Launches(TorchDispatchMode):
    """Counts kernel launches as an accelerator would make them: views are free."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2]
        if func.is_view or name.startswith(
            ("detach", "empty", "_local_scalar", "split", "_record")
        ):
            pass
        elif name.startswith("_foreach"):
            self.count += len(args[0])
        else:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_kernel_launches_per_weight():
    """Own work of a step: at most 8 launches per weight, zero rows included."""
    layers = 20
    counts = {}
    for name in ("plain", "normalized"):
        model = nn.Sequential(*[nn.Conv1d(16, 16, 3, bias=False) for _ in range(layers)])
        options = {"lr": 0.1, "foreach": False}
        optimizer = torch.optim.SGD(model.parameters(), **options)
        if name == "normalized":
            optimizer = WeightNormOptimizer(model, torch.optim.SGD, train_g=False, **options)
        set_gradients(model)
        optimizer.step()  # the first step also measures ‖v‖
        with torch.no_grad():
            model[0].weight[0] = 0  # then the zero rows of all weights are filled
        set_gradients(model)
        with Launches() as launches:
            optimizer.step()
        counts[name] = launches.count
    assert counts["plain"] == layers
    assert counts["normalized"] - counts["plain"] <= 8 * layers + 25


def test_a_compiled_step_does_not_recompile_per_weight():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8 + i, 9 + i) for i in range(12)]).double()
    twin = copy.deepcopy(model)
    options = {"lr": 0.01, "momentum": 0.9}
    compiled, plain = (WeightNormOptimizer(m, torch.optim.SGD, **options) for m in (model, twin))
    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(compiled.step, backend="eager")
    graphs = []
    for i in range(3):
        for m, s in ((model, step), (twin, plain.step)):
            for p in m.parameters():
                p.grad = torch.cos(3 * p.detach() + i)
            s()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] <= 4
    assert graphs[-1] == graphs[1]
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
