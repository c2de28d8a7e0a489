"""Sums of a layer's outputs from its inputs, against the outputs themselves."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from weightnorm import output_sums
from weightnorm.output_sums import output_axes, output_count, sum_outputs

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def expected_sum(layer, x):
    t = layer(x)
    unit = 1 if t.ndim > 2 else t.ndim - 1
    return t.sum([d for d in range(t.ndim) if d != unit])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_convolution(data):
    rank, groups = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    draw = lambda low, high: tuple(data.draw(st.integers(low, high)) for _ in range(rank))  # noqa: E731
    kernel, stride, padding, dilation = draw(1, 3), draw(1, 3), draw(0, 3), draw(1, 2)
    size = draw(1, 6)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if stride == (1,) * rank and data.draw(st.booleans()):
        make = CONVS[rank - 1]
        options["padding"] = data.draw(st.sampled_from(["same", "valid"]))
    elif data.draw(st.booleans()):
        extra = tuple(min(p, s - 1) for p, s in zip(draw(0, 2), stride, strict=True))
        make, options = TRANSPOSED[rank - 1], {**options, "output_padding": extra}
    else:
        make = CONVS[rank - 1]
    layer = make(2 * groups, 3 * groups, kernel, bias=False, dtype=torch.float64, **options)
    x = torch.randn(3, 2 * groups, *size, dtype=torch.float64)
    axes = output_axes(layer, x.shape)
    assume(axes is not None)
    torch.testing.assert_close(sum_outputs(layer, x, layer.weight, axes), expected_sum(layer, x))
    assert [axis.out for axis in axes] == list(layer(x).shape[2:])
    assert output_count(layer, x.shape, axes) == layer(x)[:, 0].numel()


def test_unequal_padding_and_padded_values_are_not_summed():
    shape = torch.Size((4, 2, 6, 7))
    assert output_axes(nn.Conv2d(2, 3, 2, padding="same"), shape) is None
    assert output_axes(nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), shape) is None
    assert output_axes(nn.Conv2d(2, 3, 9), shape) is None  # larger than the input


@pytest.mark.parametrize("shape", [(6, 5), (6, 3, 5), (0, 5)])
def test_linear(shape):
    layer, x = nn.Linear(5, 4, bias=False).double(), torch.randn(shape, dtype=torch.float64)
    total = sum_outputs(layer, x, layer.weight, output_axes(layer, x.shape))
    torch.testing.assert_close(total, layer(x).reshape(-1, 4).sum(0))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_gradient_of_the_input_is_one_expanded_image(layout):
    layer = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(7, 3, 5, 6).to(memory_format=layout).requires_grad_()
    (grad,) = torch.autograd.grad(
        sum_outputs(layer, x, layer.weight, output_axes(layer, x.shape)).square().sum(), x
    )
    assert grad.stride(0) == 0
    assert grad[0].stride() == x[0].stride()  # adds to the layer's own gradient along rows


def test_matrices_made_in_inference_mode_can_be_trained_with():
    layer, x = nn.Conv1d(2, 3, 3, padding=1), torch.randn(4, 2, 41)
    axes = output_axes(layer, x.shape)
    with torch.inference_mode():
        sum_outputs(layer, x, layer.weight, axes)
    sum_outputs(layer, x, layer.weight, axes).sum().backward()
    assert layer.weight.grad is not None


def test_half_types_are_summed_in_float32():
    layer = nn.Linear(2, 1, bias=False, dtype=torch.float16)
    nn.init.ones_(layer.weight)
    x = torch.full((4096, 2), 300.0, dtype=torch.float16)  # its sum overflows float16
    assert sum_outputs(layer, x, layer.weight, []).tolist() == [2 * 4096 * 300.0]


def test_matrices_kept_for_sequences_of_varying_length_stay_below_a_megabyte():
    cached = output_sums._cached_window_matrix
    kept = {}
    for length in (*range(21, 121), *range(2000, 2010)):
        layer, x = nn.Conv1d(1, 2, 21, bias=False), torch.randn(1, 1, length)
        axes = output_axes(layer, x.shape)
        total = sum_outputs(layer, x, layer.weight, axes)
        torch.testing.assert_close(total, expected_sum(layer, x), rtol=1e-4, atol=1e-4)
        kept.update({axis: output_sums.window_matrix(axis, total.double()) for axis in axes})
    largest = max(x.nbytes for a, x in kept.items() if a.size * a.kernel <= output_sums.MAX_CACHED)
    assert cached.cache_info().currsize == cached.cache_info().maxsize
    assert cached.cache_info().maxsize * largest <= 2**20
