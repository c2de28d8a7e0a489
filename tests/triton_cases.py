"""The Triton kernels against float64, on random weights and every layer; see test_triton.py."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from weightnorm import _kernels, weight_norm
from weightnorm._kernels import triton, triton_kernels, triton_step
from weightnorm._kernels.blocks import blocks_of, unit_view
from weightnorm.functional import Units
from zoo import every_layer

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def launches(monkeypatch):
    """The kernels that are launched."""
    found = []
    for name in ("compose", "backward"):
        kernel = getattr(triton_kernels, name)
        monkeypatch.setattr(
            triton_kernels, name, lambda *args, k=kernel, n=name: found.append(n) or k(*args)
        )
    return found


@st.composite
def weights(draw):
    """(shape, units) of one to four axes."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    kept = draw(st.sets(st.integers(0, len(shape) - 1)))
    if 0 not in kept and kept and draw(st.booleans()):
        groups = draw(st.integers(2, 3))
        return (groups * shape[0], *shape[1:]), Units(tuple(sorted(kept)), groups)
    return shape, Units(tuple(sorted(kept)) or None)


@settings(max_examples=60)
@given(weights(), st.sampled_from(DTYPES), st.integers(0, 2**16))
def test_random_weights(case, dtype, seed):
    shape, units = case
    torch.manual_seed(seed)
    v, grad_w = torch.randn(2, *shape).to(dtype)
    g = torch.randn(units.shape(shape)).to(dtype)
    blocks = blocks_of(shape, units)
    if blocks is None:
        return
    rows = units.rows(v).clone()
    rows[seed % len(rows)] *= seed % 2  # every other time with a zero unit
    v = units.from_rows(rows, v.shape).contiguous()
    w, norm = triton_kernels.compose(v, g, blocks, 1e-12)
    grads = triton_kernels.backward(grad_w, v, g, norm, blocks)
    wide = [x.double() for x in (grad_w, v, g)]
    exact, exact_norm = triton._compose_by_operations(wide[1], wide[2], blocks, 1e-12)
    expected = triton._backward_by_operations(*wide, exact_norm, blocks)
    slope = (wide[2].flatten() / exact_norm).abs().max().item()  # ∇v is a difference of that size
    for got, want in zip((w, *grads), (exact, *expected), strict=True):
        assert got.dtype == dtype
        scale = max(1.0, slope) * max(1.0, want.abs().max().item(), grad_w.abs().max().item())
        torch.testing.assert_close(
            got.double(), want, rtol=0, atol=8 * scale * torch.finfo(dtype).eps
        )


@every_layer
def test_every_layer_of_the_zoo(case, launches):
    layer, inputs = weight_norm(case.make()), case.inputs()
    before = case.run(layer, inputs)
    expected = torch.autograd.grad(before.sin().sum(), [*layer.parameters()])
    with _kernels.assume_accelerator():
        out = case.run(layer, inputs)
        torch.testing.assert_close(out, before)
        got = torch.autograd.grad(out.sin().sum(), [*layer.parameters()])
    torch.testing.assert_close(got, expected)
    assert launches.count("backward") == len(layer.parametrizations) <= launches.count("compose")


def test_applying_changes_nothing_to_the_bit():
    with _kernels.assume_accelerator():
        for make in (
            lambda: torch.nn.Linear(27, 64), lambda: torch.nn.ConvTranspose1d(6, 4, 3, groups=2)
        ):  # fmt: skip
            layer = make()
            before = layer.weight.detach().clone()
            assert torch.equal(weight_norm(layer).weight, before)


def several_weights(dtype, narrow):
    """The arguments of a step for four weights of all kinds, with zero rows and written ones."""
    shapes = {
        (4, 7): Units(),
        (6, 4, 3): Units(1, groups=2),
        (2, 3, 5): Units((0, 1)),
        (9,): Units(None),
    }
    w, now, grad, counts, fan_in = [], [], [], [], []
    for shape, units in shapes.items():
        x = torch.randn(shape)
        rows = units.rows(x).clone()
        rows[0] = 0 if len(w) % 2 else 1e-14
        x = units.from_rows(rows, x.shape).contiguous().to(narrow or dtype)
        x, _ = unit_view(x, units)
        w.append(x.to(dtype))
        now.append(x.clone())
        grad.append(torch.randn_like(x))
        counts.append(len(rows))
        fan_in.append(units.fan_in(shape))
    first = [sum(counts[:k]) for k in range(len(counts))]
    return w, now, grad, first, fan_in, sum(counts)


def step_of(which, case, g, log, project, split):
    """All results of w → v, a move of v and v → w, by torch's operations or by the kernels."""
    sums_of, to_directions, to_weights = (
        triton_step.IMPLEMENTATIONS[name][which]
        for name in ("unit_sums_", "to_directions_", "to_weights_")
    )
    w, now, grad, first, fan_in, units = case
    w, now, grad = ([x.clone() for x in each] for each in (w, now, grad))
    grad_v = [torch.empty_like(x) for x in w] if now else grad
    g, norm = g.clone(), torch.linspace(1, 2, units, dtype=g.dtype)[:, None].clone()
    grad_g, was_zero = torch.zeros_like(g), torch.zeros(units, 1, dtype=torch.bool)
    sums = None
    if split:
        sums = g.new_empty(units, 3)
        sums_of(w, now, grad, first, sums)
    to_directions(
        w, now, grad, grad_v, g, norm, grad_g, was_zero, sums, first, fan_in, log, project
    )
    middle = [x.clone() for x in (*w, *grad_v)]
    for x, slope in zip(w, grad_v, strict=True):
        x.sub_(slope, alpha=0.1)
    to_weights(w, now, g, norm, was_zero, None, first, log)
    return [*middle, *w, *now, g, grad_g, was_zero, norm]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize(
    ("dtype", "narrow", "split"),
    [
        (torch.float64, None, False),
        (torch.float32, None, True),
        (torch.float32, torch.bfloat16, False),
        (torch.float32, torch.bfloat16, True),
    ],
)
def test_a_step_of_several_weights(log, project, dtype, narrow, split):
    w, now, grad, first, fan_in, units = several_weights(dtype, narrow)
    if narrow:
        for x in w:
            x.mul_(1 + 1e-4 * torch.rand_like(x))  # what bfloat16 has rounded away
        now[0][1] *= 3  # written to
    lengths = torch.cat([(Units() if x.ndim == 2 else Units((0, 2))).norm(x).flatten() for x in w])
    g = lengths.to(dtype)[:, None] * (1 - 2 * torch.randint(2, (units, 1))) + 0.0  # not -0.0
    g = g.abs().clamp_min(1e-30).log() if log else g
    g[2] += 0.1  # its weight was written to
    case = w, now if narrow else [], grad, first, fan_in, units
    by_operations, by_kernels = (step_of(i, case, g, log, project, split) for i in range(2))
    for expected, got in zip(by_operations, by_kernels, strict=True):
        tolerance = 2**-7 if got.dtype is torch.bfloat16 else 200 * torch.finfo(dtype).eps
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_a_kernel_that_fails_gives_way_with_one_warning(monkeypatch):
    def fails(*args):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(triton_kernels, "compose", fails)
    monkeypatch.setattr(triton, "is_enabled", True)
    v, g = torch.randn(3, 4), torch.ones(3, 1)
    with _kernels.assume_accelerator(), pytest.warns(UserWarning, match="no compiler.*take over"):
        w = _kernels.compose(v, g, Units())
    torch.testing.assert_close(w, v / v.norm(dim=1, keepdim=True))
    with _kernels.assume_accelerator():  # silent from now on
        torch.testing.assert_close(_kernels.compose(v, g, Units()), w)


def test_lack_of_memory_is_raised(monkeypatch):
    def fails(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(triton_kernels, "compose", fails)
    with _kernels.assume_accelerator(), pytest.raises(torch.OutOfMemoryError):
        _kernels.compose(torch.randn(3, 4), torch.ones(3, 1), Units())
    assert triton.is_enabled
