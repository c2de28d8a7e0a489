"""The optimizer form around optimizers of other packages, Muon, and a compiler."""

import copy
import gc
from functools import partial

import dadaptation
import prodigyopt
import pytest
import schedulefree
import torch
from torch import nn
from torch._dynamo.utils import counters

from weightnorm import WeightNormOptimizer, functional, weight_norm_model
from weightnorm.lab.bench.memory import peak_bytes

INNER = {
    "prodigy": lambda: partial(prodigyopt.Prodigy, d0=1e-3),
    "d-adaptation": lambda: partial(dadaptation.DAdaptAdam, d0=1e-3, log_every=0),
    "schedule-free": lambda: partial(schedulefree.AdamWScheduleFree, lr=0.05, warmup_steps=3),
    "schedule-free sgd": lambda: partial(schedulefree.SGDScheduleFree, lr=0.3),
}


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


@pytest.mark.parametrize("make", INNER.values(), ids=INNER.keys())
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


RESUMED = {
    "prodigy": INNER["prodigy"],
    "schedule-free": INNER["schedule-free"],
    "muon": lambda: partial(torch.optim.Muon, lr=0.1),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resumes_exactly(name):
    """From a saved state, and as a copy."""

    def build():
        torch.manual_seed(0)
        model = Mixed()
        lengths = {"lengths": partial(torch.optim.Adam, lr=0.01)} if name == "muon" else {}
        return model, WeightNormOptimizer(model, RESUMED[name](), **lengths)

    def advance(model, optimizer, steps):
        optimizer.train()
        for i in steps:
            for p in model.parameters():
                p.grad = torch.cos(3 * p.detach() + i)
            optimizer.step()
        optimizer.eval()

    model, optimizer = build()
    advance(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    copied = copy.deepcopy((model, optimizer))
    advance(model, optimizer, range(3, 6))
    other, resumed = build()
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for each, its in ((other, resumed), copied):
        advance(each, its, range(3, 6))
        torch.testing.assert_close(model.state_dict(), each.state_dict(), rtol=0, atol=0)


def block():
    """Weights of 1024 inputs, four of them of equal shape."""
    return nn.Sequential(*[nn.Linear(1024, 512) for _ in range(4)], nn.Linear(1024, 1024))


def storages():
    gc.collect()
    found = (x for x in gc.get_objects() if isinstance(x, torch.Tensor))
    tensors = [x for x in found if x.layout is torch.strided]
    return {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of objects that isinstance looks at
def test_extra_state_is_below_one_percent_of_the_weights():
    model = block()
    set_gradients(model)
    before = storages()
    optimizer = WeightNormOptimizer(model, torch.optim.SGD, lr=0.1)
    optimizer.step()
    extra = sum(size for key, size in storages().items() if key not in before)
    size = sum(p.numel() * 4 for n, p in model.named_parameters() if n.endswith("weight"))
    assert 0 < extra <= 0.01 * size


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


def test_a_compiled_step_does_not_recompile_per_weight():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8 + i, 9 + i) for i in range(6)]).double()
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
