"""The optimizer form on the path of an accelerator: two launches, the same steps.

test_triton.py runs this file once more with the Triton kernels in their interpreter.
"""

import copy
import functools
import os

import pytest
import torch
from torch import nn

from reference import WeightNormReference
from weightnorm import WeightNormOptimizer, _kernels
from weightnorm.lab.bench.launches import count_launches

SGD = functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


class Experts(nn.Module):
    """Layers of every geometry: rows, channels-last, groups, a stack, and one without gradient."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 5, 4))
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.ConvTranspose1d(4, 6, 3, groups=2)
        self.linear, self.unused = nn.Linear(6, 3), nn.Linear(3, 3)

    def loss(self, i):
        torch.manual_seed(i)
        weights = [p for n, p in self.named_parameters() if "unused" not in n and p.ndim > 1]
        return sum((p.float() * torch.randn(p.shape).to(p.device)).sin().sum() for p in weights)


def optimizer_of(model, inner, **options):
    return WeightNormOptimizer(
        model,
        inner,
        where=lambda name, module: "bias" not in name,
        dim=lambda name, module: (0, 1) if name == "up" else "auto",
        **options,
    )


def train(model, optimizer, steps):
    for i in range(steps):
        optimizer.zero_grad()
        model.loss(i).backward()
        optimizer.step()
    return model.state_dict(), {name: tuple(x) for name, x in optimizer.parts().items()}


OPTIONS = {
    "plain": {},
    "log": {"scale": "log"},
    "frozen and held": {"train_g": False, "retract": True, "project": False},
    "brake": {"retract": 0.5, "v_norm": 2.0},
    "weight decay": {"weight_decay": 0.1, "weight_decay_on": "w"},
}
CASES = {
    "plain": (SGD, torch.float32),
    "log": (ADAM, torch.float64),
    "frozen and held": (SGD, torch.bfloat16),
    "brake": (ADAM, torch.float32),
    "weight decay": (ADAM, torch.bfloat16),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_steps_as_on_a_cpu(name):
    (inner, dtype), options = CASES[name], OPTIONS[name]
    model = Experts().to(dtype)
    with torch.no_grad():
        model.linear.weight[0] = 0  # without a direction
    twin = copy.deepcopy(model)
    steps = 3 if "TRITON_INTERPRET" in os.environ else 8
    expected = train(model, optimizer_of(model, inner, **options), steps)
    optimizer = optimizer_of(twin, inner, **options)
    with _kernels.assume_accelerator():
        got = train(twin, optimizer, steps)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("inner", "scale"), [(SGD, "linear"), (ADAM, "log")])
def test_thirty_steps_of_the_reference(inner, scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 2, bias=False)).double()
    twin = copy.deepcopy(model)
    optimizer = WeightNormOptimizer(model, inner, scale=scale)
    weights = dict(twin.named_parameters())
    reference = WeightNormReference(weights, inner, log=scale == "log")
    for i in range(30):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.grad, q.grad = (torch.cos(3 * q.detach() + i) for _ in range(2))
        with _kernels.assume_accelerator():
            optimizer.step()
        reference.step()
    torch.testing.assert_close(dict(model.named_parameters()), weights)


def launches(model, optimizer, x):
    with _kernels.assume_accelerator():
        for _ in range(2):
            model(x).sum().backward()
            count = count_launches(optimizer.step).total()
    return count


@pytest.mark.parametrize("layers", [12, 60])
@pytest.mark.parametrize(
    # Retraction copies ‖v‖ and puts it back; weight decay scales g, and splits off a group.
    ("options", "added"),
    [({}, 2), ({"retract": True}, 4), ({"weight_decay": 0.1}, 5)],
)
def test_launches_do_not_grow_with_the_number_of_weights(layers, options, added):
    plain = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    model, x = copy.deepcopy(plain), torch.randn(3, 4)
    adam = functools.partial(torch.optim.AdamW, lr=0.01, fused=True)
    optimizer = WeightNormOptimizer(model, adam, **{"weight_decay": 0.0, **options})
    most = launches(plain, adam(plain.parameters()), x) + added
    share_of_g = 2  # one more tensor for each weight in the inner optimizer's fused calls
    assert launches(model, optimizer, x) <= most + share_of_g
