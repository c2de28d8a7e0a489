"""The forms of w = g·v/‖v‖ against torch, each other, and finite differences."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from weightnorm import _kernels as kernels
from weightnorm._kernels import closed_form, compose, formula, fused, unit_shape

SHAPES = [(4, 3), (4, 3, 2), (2, 6, 3, 2), (3, 2, 2, 2, 2), (5, 1), (1, 5)]


def on_accelerator(v, g, dim, groups=1, eps=kernels.EPS):
    """compose as on an accelerator: a CPU tensor on the path without reads."""
    with kernels.assume_accelerator():
        return compose(v, g, dim, groups, eps)


FORMS = {
    "formula": formula,
    "closed_form": closed_form,
    "compose": compose,
    "accelerator": on_accelerator,
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def leaves(shape, dim, groups=1, dtype=torch.float64, zero_row=False):
    v = torch.randn(shape, dtype=dtype)
    if zero_row:
        v.select(dim, 0).zero_()
    g = torch.randn(unit_shape(v.shape, dim, groups), dtype=dtype)
    return v.requires_grad_(), g.requires_grad_()


def dims_of(shape):
    return [*range(len(shape)), None]


CASES = [(shape, dim) for shape in SHAPES for dim in dims_of(shape)]
every_case = pytest.mark.parametrize(("shape", "dim"), CASES)


@every_form
@every_case
def test_first_and_second_derivatives_match_finite_differences(form, shape, dim):
    v, g = leaves(shape, dim)
    assert gradcheck(lambda v, g: form(v, g, dim), (v, g))
    assert gradgradcheck(lambda v, g: form(v, g, dim), (v, g))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_form
@every_case
def test_equals_torch(form, shape, dim, dtype):
    if len(shape) > 2 and shape[-1] == 1:
        pytest.skip("torch's fused kernel takes the last axis for the first here")
    v, g = leaves(shape, dim, dtype=dtype)
    expected = (
        torch._weight_norm(v, g, -1 if dim is None else dim)
        if dim is not None
        else (v * (g / v.norm()))
    )
    got = form(v, g, dim)
    grad = torch.randn(shape, dtype=dtype)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, (v, g), grad), torch.autograd.grad(expected, (v, g), grad)
    )


@every_form
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_are_normalized_apart(form, groups):
    v, g = leaves((4, 3, 2, 2), 1, groups)
    w = form(v, g, 1, groups)
    for i, (block, scale) in enumerate(zip(v.chunk(groups), g.split(1), strict=True)):
        torch.testing.assert_close(w.chunk(groups)[i], formula(block, scale, 1))
    assert gradcheck(lambda v, g: form(v, g, 1, groups), (v, g))
    assert gradgradcheck(lambda v, g: form(v, g, 1, groups), (v, g))


@every_form
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_zero_row_gives_zero_and_no_gradient(form, dim, dtype):
    v, g = leaves((3, 4, 2), dim, dtype=dtype, zero_row=True)
    w = form(v, g, dim)
    grad_v, grad_g = torch.autograd.grad(w, (v, g), torch.ones_like(w))
    for tensor in (w, grad_v, grad_g):
        assert tensor.isfinite().all()
        assert (tensor.select(dim, 0) == 0).all()
    assert (grad_v.select(dim, 1) != 0).any()
    assert w.dtype == grad_v.dtype == dtype


@every_form
def test_nan_is_not_taken_for_a_zero_row(form):
    v, g = leaves((3, 4), 0)
    v.data[1, 2] = float("nan")
    assert form(v, g, 0)[1].isnan().all()
    assert form(v, g, 0)[0].isfinite().all()


@every_form
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_half_types_take_the_norm_in_float32_and_round_once(form, dtype, dim):
    v, g = leaves((64, 64), dim, dtype=dtype)
    v.data *= 200  # ‖v‖² overflows float16
    expected = formula(v.double(), g.double(), dim)
    got = form(v, g, dim)
    assert got.dtype == dtype
    ulp = torch.finfo(dtype).eps * expected.abs()
    assert ((got.double() - expected).abs() <= 0.51 * ulp + 1e-7).all()


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_channels_last_weights_stay_channels_last(dim):
    v, g = leaves((4, 3, 5, 2), dim)
    last = v.detach().to(memory_format=torch.channels_last).requires_grad_()
    w = compose(last, g, dim)
    assert w.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(w, formula(v, g, dim), check_stride=False)
    assert gradcheck(lambda v, g: compose(v, g, dim), (last, g))


def test_fused_declines_a_zero_row_also_beside_nan():
    v, g = leaves((3, 4), 0, zero_row=True)
    assert fused(v, g) is None
    v.data[1] = float("nan")
    assert fused(v, g) is None
    assert fused(*leaves((3, 4), 0)) is not None


@every_form
@pytest.mark.parametrize("dim", [0, 1])
def test_zero_rows_stay_zero_beside_nan(form, dim):
    v, g = leaves((3, 4), dim, zero_row=True)
    v.data.select(dim, 1).fill_(float("nan"))
    w = form(v, g, dim)
    assert (w.select(dim, 0) == 0).all()
    assert w.select(dim, 1).isnan().all()
    assert w.select(dim, 2).isfinite().all()


@pytest.mark.parametrize("form", [compose, on_accelerator], ids=["cpu", "accelerator"])
def test_columns_of_a_matrix(form):
    v, g = leaves((3, 70), 1)
    torch.testing.assert_close(form(v, g, 1), formula(v, g, 1))
    assert gradcheck(lambda v, g: form(v, g, 1), (v, g), fast_mode=True)
    assert gradgradcheck(lambda v, g: form(v, g, 1), (v, g), fast_mode=True)
    zero, g = leaves((3, 70), 1, zero_row=True)
    assert (form(zero, g, 1)[:, 0] == 0).all()


def test_fused_rows_serves_every_axis_but_none(monkeypatch):
    used = []
    monkeypatch.setattr(kernels, "_rows", lambda v, g, dim, eps: used.append(dim) or v)
    for dim in (0, 1, 2, 3):
        on_accelerator(*leaves((4, 3, 5, 2), dim), dim)
    on_accelerator(*leaves((4, 3, 5, 2), 1, groups=2), 1, 2)
    assert used == [0, 0, 0, 1, 0]
    on_accelerator(*leaves((4, 3, 5, 2), None), None)
    assert len(used) == 5


def test_a_temporary_v_is_freed_with_the_graph():
    """Also while w lives: the hook for second derivatives holds no reference of its own."""
    v, g = leaves((3, 4, 2), 1)
    w = compose(v, g, 1)  # computed from a transposed copy of v
    node = w.grad_fn.next_functions[0][0].next_functions[0][0]
    copied = weakref.ref(node._saved_v)
    assert copied().data_ptr() != v.data_ptr()
    w.sum().backward()
    gc.collect()
    assert copied() is None


@pytest.mark.parametrize("dim", [0, 1])
def test_the_backward_keeps_only_v_g_and_the_norms(dim):
    v, g = leaves((6, 4, 3), dim)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        compose(v, g, dim)
    assert sum(t.numel() for t in kept) <= v.numel() + 2 * g.numel()


def test_function_transforms_and_forward_mode():
    v, g = (t.detach() for t in leaves((3, 4), 0))
    batch = torch.stack([v, 2 * v])
    both = torch.func.vmap(lambda v: compose(v, g, 0))(batch)
    torch.testing.assert_close(both[0], both[1])
    jacobian = torch.func.jacrev(lambda v: compose(v, g, 0))(v)
    torch.testing.assert_close(jacobian, torch.func.jacfwd(lambda v: compose(v, g, 0))(v))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v, v)
        tangent = torch.autograd.forward_ad.unpack_dual(compose(dual, g, 0)).tangent
    torch.testing.assert_close(tangent, torch.zeros_like(v))  # along v, w does not move


def test_shapes():
    shape = torch.Size((4, 3, 2))
    assert unit_shape(shape, 1) == (1, 3, 1)
    assert unit_shape(shape, 1, groups=2) == (2, 3, 1)
    assert unit_shape(shape, None) == ()
    assert kernels.block_shape(shape, 1, 2) == (2, 2, 3, 2)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("strided", [lambda g: g[::2], lambda g: g[:1].expand(6, 1)])
def test_g_may_be_strided(strided, on_device):
    v = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    g = strided(torch.rand(12, 1, dtype=torch.float64)).requires_grad_()
    assert not g.is_contiguous()

    def compute(v, g):
        with kernels.assume_accelerator() if on_device else contextlib.nullcontext():
            return compose(v, g, 0)

    torch.testing.assert_close(compute(v, g), formula(v, g, 0))
    grad_w = torch.randn_like(v)
    expected = torch.autograd.grad(formula(v, g, 0), (v, g), grad_w)
    torch.testing.assert_close(torch.autograd.grad(compute(v, g), (v, g), grad_w), expected)
    with torch.no_grad():
        torch.testing.assert_close(kernels.gradients(grad_w, v, g, 0), expected)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("form", [kernels.compose, kernels.gradients], ids=["compose", "gradients"])
def test_one_length_for_each_unit(form, dim):
    v = torch.randn(3, 4, 2)
    grad = [torch.ones_like(v)] if form is kernels.gradients else []
    for grads in (True, False):
        with torch.set_grad_enabled(grads), pytest.raises(ValueError, match="g has shape"):
            form(*grad, v, torch.ones(2, 1, 1), dim)


@pytest.mark.parametrize("form", [formula, closed_form, on_accelerator])
def test_third_derivatives_are_zero_in_a_zero_row(form):
    v, g = torch.randn(3, 2, dtype=torch.float64), torch.randn(3, 1, dtype=torch.float64)
    v[1] = 0
    inputs = v.requires_grad_(), g.requires_grad_()
    total = form(v, g, 0).square().mul(torch.arange(1.0, 3)).sum()
    for _ in range(3):
        grads = torch.autograd.grad(total, inputs, create_graph=True)
        assert all((grad[1] == 0).all() for grad in grads)
        assert all(grad.isfinite().all() for grad in grads)
        total = sum(grad.tanh().sum() for grad in grads)


@every_form
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_up_to_eps_are_zero_rows(form, dim, grad):
    eps = 0.5
    v, g = leaves((3, 4), dim)
    v.data.select(dim, 0).zero_()[0] = eps
    v.data.select(dim, 1).zero_()[0] = 1.001 * eps
    v.data.select(dim, 2).fill_(eps)
    with torch.set_grad_enabled(grad):
        w = form(v, g, dim, 1, eps)
    norms = w.detach().norm(dim=1 - dim)
    assert norms[0] == 0
    torch.testing.assert_close(norms[1:], g.detach().flatten()[1:].abs())
    if grad:
        grad_v, grad_g = torch.autograd.grad(w, (v, g), torch.ones_like(w))
        assert (grad_v.select(dim, 0) == 0).all()
        assert grad_g.flatten()[0] == 0
        assert grad_g.flatten()[1] != 0


@every_form
def test_short_rows_have_second_derivatives(form):
    def second(form):
        total = form(v, g, 0).square().mul(factors).sum()
        (grad,) = torch.autograd.grad(total, v, create_graph=True)
        return torch.autograd.grad(grad, (v, g), grad_v)

    v, g = leaves((3, 4), 0)
    v.data *= 1e-4
    factors, grad_v = torch.rand(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(second(form), second(formula), rtol=1e-9, atol=0)


@every_form
def test_an_expanded_gradient(form):
    v, g = leaves((3, 4), 0)
    got = torch.autograd.grad(form(v, g, 0).sum(), (v, g))
    torch.testing.assert_close(got, torch.autograd.grad(formula(v, g, 0).sum(), (v, g)))


@pytest.mark.parametrize("form", [compose, on_accelerator], ids=["cpu", "accelerator"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("types", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32)])
def test_g_of_another_type(form, dim, types):
    v, g = leaves((3, 70), dim)
    v, g = (x.detach().to(dtype).requires_grad_() for x, dtype in zip((v, g), types, strict=True))
    expected = formula(v.double(), g.double(), dim)
    got = form(v, g, dim)
    assert got.dtype == types[0]
    tolerance = {"rtol": 2 * torch.finfo(types[0]).eps, "atol": 0}
    torch.testing.assert_close(got.double(), expected, **tolerance)
    grad_v, grad_g = torch.autograd.grad(got.double().sum(), (v, g))
    assert (grad_v.dtype, grad_g.dtype) == types


def test_gradients_of_another_type_than_the_weight():
    v, g = (x.detach().float() for x in leaves((3, 4), 0))
    grad_w = torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        got = kernels.gradients(grad_w, v, g, 0)
        expected = kernels.gradients(grad_w, v.double(), g.double(), 0)
    assert [x.dtype for x in got] == [torch.float32] * 2
    torch.testing.assert_close(got, tuple(x.float() for x in expected))


@every_form
@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_weights_without_elements(form, shape):
    v, g = leaves(shape, 0)
    w = form(v, g, 0)
    assert w.shape == shape
    grads = torch.autograd.grad(w.sum(), (v, g))
    assert [x.shape for x in grads] == [v.shape, g.shape]


def test_assuming_an_accelerator_may_be_nested():
    v = torch.zeros(1)
    with kernels.assume_accelerator():
        with kernels.assume_accelerator():
            assert kernels.on_accelerator(v)
        assert kernels.on_accelerator(v)
    assert not kernels.on_accelerator(v)
