"""One layer of every type with a matching input, for tests over all of them."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from weightnorm import data_dependent_init, mean_only_batch_norm, weight_norm_model


@dataclass(frozen=True)
class Case:
    """A layer and an input for it; ``run`` returns the first output."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]

    def run(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        out = layer(*inputs)
        return out[0] if isinstance(out, tuple) else out


def _real(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(shape),)


LAYERS = {
    "linear": Case(lambda: nn.Linear(5, 4), _real(3, 5)),
    "linear-no-bias": Case(lambda: nn.Linear(5, 4, bias=False), _real(3, 5)),
    "bilinear": Case(lambda: nn.Bilinear(3, 4, 5), lambda: (torch.randn(6, 3), torch.randn(6, 4))),
    "conv1d": Case(lambda: nn.Conv1d(4, 6, 3, groups=2), _real(2, 4, 9)),
    "conv2d": Case(lambda: nn.Conv2d(3, 6, 3, stride=2, padding=1), _real(2, 3, 7, 7)),
    "conv3d": Case(lambda: nn.Conv3d(2, 3, 2), _real(2, 2, 4, 4, 4)),
    "conv-transpose1d": Case(lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), _real(2, 4, 5)),
    "conv-transpose2d": Case(
        lambda: nn.ConvTranspose2d(3, 5, 3, output_padding=1, stride=2), _real(2, 3, 4, 4)
    ),
    "conv-transpose2d-grouped": Case(
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), _real(2, 4, 4, 4)
    ),
    "conv-transpose3d": Case(lambda: nn.ConvTranspose3d(2, 3, 2), _real(2, 2, 3, 3, 3)),
    "embedding": Case(lambda: nn.Embedding(7, 3), lambda: (torch.tensor([0, 2, 6, 2]),)),
    "embedding-bag": Case(lambda: nn.EmbeddingBag(7, 3), lambda: (torch.tensor([[0, 2], [6, 2]]),)),
    "rnn": Case(lambda: nn.RNN(3, 4, num_layers=2), _real(5, 2, 3)),
    "lstm": Case(
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), _real(2, 5, 3)
    ),
    "gru": Case(lambda: nn.GRU(3, 4), _real(5, 2, 3)),
    "rnn-cell": Case(lambda: nn.RNNCell(3, 4), lambda: (torch.randn(2, 3), torch.randn(2, 4))),
    "lstm-cell": Case(
        lambda: nn.LSTMCell(3, 4),
        lambda: (torch.randn(2, 3), (torch.randn(2, 4), torch.randn(2, 4))),
    ),
    "gru-cell": Case(lambda: nn.GRUCell(3, 4), lambda: (torch.randn(2, 3), torch.randn(2, 4))),
    "attention": Case(lambda: nn.MultiheadAttention(8, 2), lambda: (torch.randn(4, 2, 8),) * 3),
    "attention-kdim": Case(
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=5),
        lambda: (torch.randn(4, 2, 8), torch.randn(4, 2, 6), torch.randn(4, 2, 5)),
    ),
}

every_layer = pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS.keys())


class Vector(nn.Module):
    """A module with a weight of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def trained_network() -> nn.Sequential:
    """Return a network for images, initialized on data, with running means of several batches."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        mean_only_batch_norm(nn.ConvTranspose2d(4, 6, 3, groups=2)),
        nn.Flatten(),
        mean_only_batch_norm(nn.Linear(6 * 64, 4)),
    )
    weight_norm_model(model)
    images = torch.randn(20, 3, 8, 8) + 1
    data_dependent_init(model, images)
    for _ in range(3):
        model(images)
    return model.eval()
