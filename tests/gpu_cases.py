"""Both forms on a real accelerator against a CPU: ``make test-gpu``.

The suite runs this file on CPU tensors with the Triton kernels in their interpreter, so that it is
known to work before anyone has a GPU; see test_triton.py.
"""

import copy
import os

import pytest
import torch
from torch.utils._pytree import tree_map

from test_kernels import CASES, reference
from test_optimizer_accelerator import ADAM, OPTIONS, Experts, optimizer_of, train
from weightnorm import _kernels, functional, weight_norm
from zoo import every_layer

DEVICE = os.environ.get("WEIGHTNORM_TEST_DEVICE", "cuda")


@pytest.fixture(autouse=True)
def on_accelerator():
    with _kernels.assume_accelerator():
        yield


def to_device(tree):
    return tree_map(lambda x: x.to(DEVICE) if isinstance(x, torch.Tensor) else x, tree)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "units"), CASES.values(), ids=CASES.keys())
def test_weights_and_gradients(shape, units, dtype):
    v, grad_w = torch.randn(2, *shape).to(dtype)
    g = torch.randn(units.shape(shape)).to(dtype)
    exact = [x.double().requires_grad_() for x in (v, g)]
    expected = reference(*exact, units)
    expected_gradients = torch.autograd.grad(expected, exact, grad_w.double())
    leaves = [x.to(DEVICE).requires_grad_() for x in (v, g)]
    w = functional.compose(v=leaves[0], g=leaves[1], units=units)
    gradients = torch.autograd.grad(w, leaves, grad_w.to(DEVICE))
    tolerance = 64 * torch.finfo(dtype).eps
    for got, want in zip((w, *gradients), (expected, *expected_gradients), strict=True):
        largest = max(1.0, want.abs().max().item())
        torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=tolerance * largest)


@every_layer
def test_every_layer(case):
    layer, inputs = weight_norm(case.make()), case.inputs()
    twin, there = copy.deepcopy(layer).to(DEVICE), to_device(inputs)
    outputs = case.run(layer, inputs), case.run(twin, there)
    for out in outputs:
        out.sin().sum().backward()
    torch.testing.assert_close(outputs[1].cpu(), outputs[0], rtol=1e-3, atol=1e-3)
    for ours, theirs in zip(twin.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_steps_of_the_optimizer_form(options):
    model = Experts()
    twin = copy.deepcopy(model).to(DEVICE)
    expected = train(model, optimizer_of(model, ADAM, **options), 3)
    got = train(twin, optimizer_of(twin, ADAM, **options), 3)
    got = tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, got)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
def test_a_cuda_graph_captures_the_step():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(DEVICE)
    adam = {"lr": 0.01, "capturable": True}
    optimizer = optimizer_of(model, torch.optim.Adam, **adam)
    twin = copy.deepcopy(model)
    eager = optimizer_of(twin, torch.optim.Adam, **adam)
    x = torch.randn(16, 8, device=DEVICE)

    def step(model, optimizer):
        model(x).square().sum().backward()
        optimizer.step()

    for _ in range(3):
        step(model, optimizer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(model, optimizer)
    graph.replay()
    for _ in range(4):
        step(twin, eager)
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))
