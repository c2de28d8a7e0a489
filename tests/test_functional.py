"""Pure functions against autograd, naive forms and the identities of the paper."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.utils._python_dispatch import TorchDispatchMode

from weightnorm import _kernels as kernels
from weightnorm.functional import (
    Units,
    compose,
    decompose,
    gradients,
    norm,
    project,
    row_norm_low_rank,
)

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def weights(draw):
    """(weight, units) of any shape, with or without zero rows."""
    shape = draw(shapes)
    dim = draw(st.sampled_from([*range(-len(shape), len(shape)), None]))
    w = torch.randn(shape, dtype=torch.float64, generator=_generator(draw))
    if dim is not None and draw(st.booleans()):
        w.select(dim, 0).zero_()
    return w, Units(dim)


def _generator(draw):
    return torch.Generator().manual_seed(draw(st.integers(0, 2**31)))


@given(weights())
def test_compose_inverts_decompose(case):
    w, units = case
    v, g = decompose(w, units)
    torch.testing.assert_close(compose(v=v, g=g, units=units), w)
    assert v.data_ptr() != w.data_ptr()


@given(weights(), st.floats(-3, 3))
def test_norm_of_w_is_g_for_any_v(case, length):
    v, units = case
    v = decompose(v, units).v  # no zero rows
    g = torch.full_like(norm(v, units), length)
    torch.testing.assert_close(norm(compose(v=v, g=g, units=units), units), g.abs())
    torch.testing.assert_close(compose(v=7 * v, g=g, units=units), compose(v=v, g=g, units=units))


@given(weights(), st.data())
def test_gradients_match_eq_3_eq_4_and_autograd(case, data):
    v, units = case
    v = decompose(v, units).v.requires_grad_()
    g = torch.randn(norm(v, units).shape, dtype=v.dtype).requires_grad_()
    grad_w = torch.randn(v.shape, dtype=v.dtype, generator=_generator(data.draw))
    grad_v, grad_g = gradients(grad_w, v=v, g=g, units=units)
    w = compose(v=v, g=g, units=units)
    expected = torch.autograd.grad(w, (v, g), grad_w)
    torch.testing.assert_close((grad_v, grad_g), expected)
    with torch.no_grad():  # torch's fused kernel, where it fits
        torch.testing.assert_close(tuple(gradients(grad_w, v=v, g=g, units=units)), expected)
    torch.testing.assert_close(grad_v, g / norm(v, units) * project(grad_w, w, units))  # eq. 4
    along = (grad_v * v).sum()  # ∇v·v = 0, summed over units whose every term is 0
    torch.testing.assert_close(along, torch.zeros_like(along), atol=1e-9, rtol=0)


@given(weights(), st.data())
def test_projection_is_idempotent_symmetric_and_removes_w(case, data):
    w, units = case
    x, y = (torch.randn(w.shape, dtype=w.dtype, generator=_generator(data.draw)) for _ in "xy")
    torch.testing.assert_close(project(project(x, w, units), w, units), project(x, w, units))
    torch.testing.assert_close((project(x, w, units) * y).sum(), (x * project(y, w, units)).sum())
    torch.testing.assert_close(project(w, w, units), torch.zeros_like(w), atol=1e-12, rtol=0)


def test_grouped_gradients_and_projection():
    v = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    g = torch.randn(2, 3, 1, dtype=torch.float64, requires_grad=True)
    grad_w = torch.randn_like(v)
    w = compose(v=v, g=g, units=Units(1, groups=2))
    expected = torch.autograd.grad(w, (v, g), grad_w)
    torch.testing.assert_close(
        tuple(gradients(grad_w, v=v, g=g, units=Units(1, groups=2))), expected
    )
    for half in (slice(0, 2), slice(2, 4)):
        torch.testing.assert_close(
            project(grad_w, w, Units(1, groups=2))[half],
            project(grad_w[half], w[half], Units(1)),
        )


def test_mask_is_applied_before_normalization():
    v, g = torch.tensor([[3.0, 4.0, 9.0], [1.0, 1.0, 1.0]]), torch.tensor([[5.0], [1.0]])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    w = compose(v=v, g=g, mask=mask)
    torch.testing.assert_close(w, torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]))


def test_masked_zero_row_gets_a_direction_inside_the_mask():
    mask = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    v, g = decompose(torch.zeros(2, 2), mask=mask)
    torch.testing.assert_close(v, mask)
    assert (g == 0).all()


def test_wrong_mask_shape_raises():
    with pytest.raises(RuntimeError, match=r"must match"):
        compose(v=torch.randn(3, 2), g=torch.ones(3, 1), mask=torch.ones(3))


@pytest.mark.parametrize("dim", [2, -3])
def test_dim_out_of_range_raises(dim):
    with pytest.raises(IndexError, match=rf"dim={dim} is out of range .* 2 dimensions"):
        decompose(torch.randn(3, 2), Units(dim))


@pytest.mark.parametrize(("dim", "groups"), [(0, 2), (None, 2), (1, 3), (1, 0)])
def test_invalid_groups_raise(dim, groups):
    with pytest.raises(ValueError, match=f"groups={groups} must divide axis 0"):
        norm(torch.randn(4, 3), Units(dim, groups))


# ‖W + sBA‖ without building the matrix


def low_rank(out=6, n=9, rank=2, dtype=torch.float64):
    shapes = ((out, n), (rank, n), (out, rank))
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 4), st.floats(-4, 4))
def test_low_rank_norm_equals_the_naive_one(out, n, rank, s):
    W, A, B = low_rank(out, n, rank)
    expected = norm(W + s * B @ A)
    torch.testing.assert_close(row_norm_low_rank(W, A, B, s), expected, atol=1e-7, rtol=1e-9)


def test_low_rank_norm_derivatives_match_finite_differences():
    inputs = [x.requires_grad_() for x in low_rank(3, 4, 2)]
    s = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(row_norm_low_rank, (*inputs, s))
    assert torch.autograd.gradgradcheck(row_norm_low_rank, (*inputs, s))


def test_low_rank_norm_second_derivative_at_a_zero_row_of_w():
    W, A, B = low_rank(1, 3, 1)
    zero, low = torch.zeros_like(W), lambda W: row_norm_low_rank(W, A, B).sum()
    naive = torch.autograd.functional.hessian(lambda W: (W + B @ A).norm(), zero)
    torch.testing.assert_close(torch.autograd.functional.hessian(low, zero), naive)
    torch.testing.assert_close(torch.func.hessian(low)(zero), naive)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_rank_norm_is_float32_for_half_precision(dtype):
    W, A, B = low_rank(32, 64, 4, dtype)
    got = row_norm_low_rank(W, A, B, 0.5)
    assert got.dtype is torch.float32
    exact = norm(W.double() + 0.5 * B.double() @ A.double())
    torch.testing.assert_close(got.double(), exact, atol=0, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_rank_norm_where_the_terms_cancel(dtype):
    _, A, B = low_rank(200, 64, 4, dtype)
    A, B = A.requires_grad_(), B.requires_grad_()
    W = (B @ A).detach()
    W[0] = B.detach()[0] = 0  # cancels exactly
    got = row_norm_low_rank(W, A, B, -1.0)
    assert (got <= 4 * torch.finfo(dtype).eps ** 0.5 * norm(W)).all()  # NaN is not
    assert got[0] == 0
    gradients = torch.autograd.grad(got[:1].sum(), (A, B))
    assert all((x == 0).all() for x in gradients)


def test_low_rank_norm_builds_no_matrix_of_the_size_of_w(monkeypatch):
    class LargestResult(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not func.is_view:
                self.largest = max(self.largest, out.numel())
            return out

    monkeypatch.setattr(kernels, "is_eager", lambda v: True)  # as without the dispatch mode
    W, A, B = low_rank(64, 64, 4)
    with LargestResult() as seen:
        row_norm_low_rank(W, A, B)
    assert seen.largest <= B.numel()
    with LargestResult() as seen:
        norm(W + B @ A)
    assert seen.largest == W.numel()


@pytest.mark.parametrize(
    "shapes", [((3, 4), (2, 5), (3, 2)), ((3, 4), (2, 4), (3, 1)), ((3, 4, 1), (2, 4), (3, 2))]
)
def test_low_rank_norm_wrong_shapes_raise(shapes):
    with pytest.raises(ValueError, match=r"expected \(out, in\), \(rank, in\), \(out, rank\)"):
        row_norm_low_rank(*map(torch.ones, shapes))


def test_low_rank_norm_is_exact_under_autocast():
    torch.manual_seed(0)
    A, B = torch.randn(4, 512), torch.randn(64, 4)
    W = 0.02 * torch.randn(64, 512) - B @ A
    expected = (W.double() + B.double() @ A.double()).norm(dim=1, keepdim=True).float()
    with torch.autocast("cpu", torch.bfloat16):
        found = row_norm_low_rank(W, A, B)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("grad", [True, False])
def test_wrong_shapes_are_refused(grad):
    v, g = torch.randn(4, 5), torch.ones(4, 1)
    with torch.set_grad_enabled(grad):
        with pytest.raises(ValueError, match=r"grad_w has shape \(1, 5\), v has \(4, 5\)"):
            gradients(torch.ones(1, 5), v=v, g=g)
        for wrong in (torch.ones(1, 1), torch.ones(5, 1), torch.ones(4)):
            with pytest.raises(ValueError, match=r"needs \(4, 1\)"):
                gradients(torch.ones(4, 5), v=v, g=wrong)
            with pytest.raises(ValueError, match=r"needs \(4, 1\)"):
                compose(v=v, g=wrong)


def test_decompose_keeps_the_memory_format():
    for memory_format in (torch.channels_last, torch.contiguous_format):
        w = torch.randn(4, 3, 2, 2).to(memory_format=memory_format)
        w[0] = 0
        v, g = decompose(w)
        assert v.stride() == w.stride()
        assert torch.equal(compose(v=v, g=g)[0], w[0])


@pytest.mark.parametrize("wide", range(3))
def test_low_rank_norm_is_computed_in_the_widest_type(wide):
    exact = low_rank()
    mixed = [x if i == wide else x.float() for i, x in enumerate(exact)]
    got = row_norm_low_rank(*mixed)
    assert got.dtype is torch.float64
    W, A, B = (x.double() for x in mixed)
    torch.testing.assert_close(got, norm(W + B @ A), rtol=1e-12, atol=0)
