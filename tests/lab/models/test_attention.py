"""DRAW's attention against its definition, element by element."""

import math

import pytest
import torch

from weightnorm.lab.models.attention import Attention


def slow_filters(parameters, size, side):
    """F_y and F_x of one image, from the definition."""
    p_y, p_x, log_delta, log_variance, _ = parameters
    stride = (side - 1) / (size - 1) * math.exp(log_delta)
    found = []
    for p in (p_y, p_x):
        rows = []
        for i in range(size):
            mean = (p + 1) / 2 * side + (i - size / 2 + 0.5) * stride
            row = [
                math.exp(-((pixel - mean) ** 2) / (2 * math.exp(log_variance)))
                for pixel in range(side)
            ]
            rows.append([weight / (sum(row) + 1e-4) for weight in row])
        found.append(torch.tensor(rows, dtype=torch.float64))
    return found


def attention(size, side):
    return Attention(size, side).double()


@pytest.mark.parametrize(("size", "side"), [(2, 28), (5, 28), (3, 8), (12, 4)])
def test_read_and_write_match_the_definition(size, side):
    parameters = torch.randn(6, 5, dtype=torch.float64)
    images = [torch.randn(6, side**2, dtype=torch.float64) for _ in range(2)]
    patch = torch.randn(6, size**2, dtype=torch.float64)
    grid = attention(size, side)
    read = grid.read(tuple(images), grid.window(parameters))
    written = grid.write(patch, grid.window(parameters))
    for k, row in enumerate(parameters.tolist()):
        y, x = slow_filters(row, size, side)
        gamma = math.exp(row[4])
        seen = [gamma * y @ image[k].view(side, side) @ x.T for image in images]
        torch.testing.assert_close(read[k], torch.cat([patch.flatten() for patch in seen]))
        written_patch = y.T @ patch[k].view(size, size) @ x / gamma
        torch.testing.assert_close(written[k], written_patch.flatten())


def middle(side, **logs):
    """Parameters that centre the grid on the image."""
    p = (side - 1) / side - 1
    rest = {"delta": 0.0, "variance": 0.0, "gamma": 0.0} | logs
    return torch.tensor([[p, p, *rest.values()]], dtype=torch.float64)


def test_grid_as_large_as_the_image_reproduces_it():
    image = torch.rand(1, 28 * 28, dtype=torch.float64)
    grid = attention(28, 28)
    window = grid.window(middle(28, variance=-6.0, gamma=1.5))
    back = grid.write(grid.read((image,), window), window)
    torch.testing.assert_close(back, image, atol=1e-3, rtol=0)


def test_filter_outside_of_the_image_reads_zero():
    grid = attention(2, 8)
    far = torch.tensor([[40.0, 0.0, -3.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    seen = grid.read((torch.ones(1, 64, dtype=torch.float64),), grid.window(far))
    assert seen.abs().max() == 0
    seen.sum().backward()
    assert far.grad.isfinite().all()


def test_window_is_in_pixels():
    centre, stride, precision, gamma = attention(5, 28).window(
        torch.tensor([[0.0, 0.5, math.log(0.5), math.log(4.0), math.log(3.0)]])
    )
    assert centre.tolist() == [[14.0, 21.0]]
    for found, expected in ((stride, 27 / 4 / 2), (precision, 1 / 4), (gamma, 3.0)):
        assert found.item() == pytest.approx(expected)
