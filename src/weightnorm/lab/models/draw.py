"""DRAW (Gregor et al. 2015) as implemented in github.com/jbornschein/draw (section 5.3).

At each of T steps the encoder reads from the image x and the error image x̂, a latent z is sampled,
and the decoder writes to the canvas c:

    x̂ = x − sigmoid(c);  h_enc = LSTM([read(x, x̂, h_dec), h_dec]);
    z = μ(h_enc) + e^{log σ(h_enc)}·u;  h_dec = LSTM(z);  c = c + write(h_dec)

The h_dec in the first line is the previous step's. Canvas and LSTM states are initially 0.

Note [once per sequence]
    A step takes tensors, not layers: `DRAW.weights` computes all weights once and passes them to
    every step. So a normalized weight is computed and differentiated once per sequence, and layers
    with the same input are one matrix product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm.lab.models.attention import WINDOW_PARAMETERS, Attention

INIT_STD = 0.01


class Affine(NamedTuple):
    """The map x ↦ Wx + b, as tensors."""

    weight: Tensor
    bias: Tensor

    def __call__(self, *inputs: Tensor) -> Tensor:
        x = torch.cat(inputs, 1) if len(inputs) > 1 else inputs[0]
        return F.linear(x, self.weight, self.bias)


def concatenated(*layers: nn.Linear) -> Affine:
    """Return layers with the same input as one map; their outputs are concatenated."""
    return Affine(torch.cat([a.weight for a in layers]), torch.cat([a.bias for a in layers]))


class LSTMState(NamedTuple):
    """Hidden state and cell state of an LSTM, (B, H) each."""

    h: Tensor
    c: Tensor


class LSTMWeights(NamedTuple):
    gates: Affine  # of [inputs, h]
    peepholes: Tensor


class PeepholeLSTM(nn.Module):
    """An LSTM with diagonal peepholes and one bias, the input layer's."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)
        self.peepholes = nn.Parameter(torch.empty(3, hidden))

    def weights(self) -> LSTMWeights:
        gates = torch.cat([self.input.weight, self.recurrent.weight], 1)
        return LSTMWeights(Affine(gates, self.input.bias), self.peepholes)


def lstm_step(weights: LSTMWeights, state: LSTMState, *inputs: Tensor) -> LSTMState:
    """Return the next state; the inputs are concatenated."""
    return apply_gates(weights.gates(*inputs, state.h), weights.peepholes, state.c)


def apply_gates(t: Tensor, peepholes: Tensor, c: Tensor) -> LSTMState:
    """Return the next state, given the pre-activations t of the gates (i, f, g, o):

    i = σ(t_i + p_i c), f = σ(t_f + p_f c), c′ = f c + i tanh t_g, o = σ(t_o + p_o c′),
    h′ = o tanh c′.
    """
    size = c.shape[1]
    t_if, t_g, t_o = t.split([2 * size, size, size], 1)
    p_if, p_o = peepholes.split([2, 1])
    t_if = torch.addcmul(t_if.unflatten(1, (2, size)), p_if, c.unsqueeze(1))
    i, f = t_if.sigmoid().unbind(1)
    c = torch.addcmul(f * c, i, t_g.tanh())
    o = torch.addcmul(t_o, p_o, c).sigmoid()
    return LSTMState(o * c.tanh(), c)


class SequenceWeights(NamedTuple):
    """Weights that all steps of a sequence share."""

    encoder: LSTMWeights
    code: Affine  # of h_enc: μ, log σ
    decoder: LSTMWeights
    outputs: Affine  # of h_dec: next read window, write window, patch


class StepState(NamedTuple):
    """State between two steps."""

    canvas: Tensor  # (B, side²), logits
    encoder: LSTMState
    decoder: LSTMState
    read_window: Tensor  # (B, 5): parameters of the next read
    write_window: Tensor  # (B, 5): parameters of the last write


class Bound(NamedTuple):
    """The two terms of −ELBO, per example, in nats."""

    nll: Tensor
    """−log p(x | z), summed over pixels: (B,)."""
    kl: Tensor
    """KL(q(z | x) ‖ p(z)), summed over steps: (B,)."""

    @property
    def negative_elbo(self) -> Tensor:
        return self.nll + self.kl


class GeneratedImages(NamedTuple):
    """Generated images after every step."""

    canvases: Tensor
    """Pixel probabilities: (T, B, side, side)."""
    boxes: Tensor
    """Position of each write: centre y, x and side of the square that the filters' means span, in
    pixels: (T, B, 3)."""


class DRAW(nn.Module):
    """DRAW on binary images of `side` × `side` pixels.

    Args:
        hidden: units of the encoder's and of the decoder's LSTM.
        latent: dimension of z at each step.
        read_size: filters along each axis of the read grid.
        write_size: filters along each axis of the write grid.
        attention: whether to read and write through filters, or all pixels at each step.

    The number of steps is given by the noise.
    """

    reader: Attention
    writer: Attention
    read_window: nn.Linear
    write_window: nn.Linear

    def __init__(
        self,
        *,
        side: int = 28,
        hidden: int = 256,
        latent: int = 100,
        read_size: int = 2,
        write_size: int = 5,
        attention: bool = True,
    ) -> None:
        super().__init__()
        self.side, self.hidden, self.attention = side, hidden, attention
        glimpse = 2 * (read_size if attention else side) ** 2
        self.encoder = PeepholeLSTM(glimpse + hidden, hidden)
        self.mean = nn.Linear(hidden, latent)
        self.log_sigma = nn.Linear(hidden, latent)
        self.decoder = PeepholeLSTM(latent, hidden)
        if attention:
            self.reader, self.writer = Attention(read_size, side), Attention(write_size, side)
            self.read_window, self.write_window = (
                nn.Linear(hidden, WINDOW_PARAMETERS) for _ in range(2)
            )
        # The patch to write. The name is part of saved state dicts.
        self.ink = nn.Linear(hidden, (write_size if attention else side) ** 2)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=INIT_STD)

    def weights(self) -> SequenceWeights:
        """Return the current weights; see Note [once per sequence]."""
        windows = (self.read_window, self.write_window) if self.attention else ()
        return SequenceWeights(
            self.encoder.weights(),
            concatenated(self.mean, self.log_sigma),
            self.decoder.weights(),
            concatenated(*windows, self.ink),
        )

    def forward(self, x: Tensor, noise: Tensor) -> Bound:
        """Return the bound for images (B, side²), given the posterior's noise (T, B, latent)."""
        weights, codes = self.weights(), []
        state = self.initial_state(x.shape[0], weights)
        for u in noise.unbind():
            state, code = self.step(x, u, state, weights)
            codes.append(code)
        nll = F.binary_cross_entropy_with_logits(state.canvas, x, reduction="none").sum(1)
        mean, log_sigma = torch.stack(codes).chunk(2, 2)  # (T, B, latent)
        return Bound(nll, kl_from_standard_normal(mean, log_sigma).sum((0, 2)))

    def step(
        self, x: Tensor, u: Tensor, state: StepState, weights: SequenceWeights
    ) -> tuple[StepState, Tensor]:
        """Read, sample a latent, and write. Return the next state and (μ, log σ), (B, 2·latent)."""
        error = x - state.canvas.sigmoid()
        glimpse = self.read(x, error, state)
        encoder = lstm_step(weights.encoder, state.encoder, *glimpse, state.decoder.h)
        code = weights.code(encoder.h)
        mean, log_sigma = code.chunk(2, 1)
        z = torch.addcmul(mean, log_sigma.exp(), u)
        return self.decode(z, state._replace(encoder=encoder), weights), code

    def read(self, x: Tensor, error: Tensor, state: StepState) -> tuple[Tensor, ...]:
        """Return the glimpse of the image and of the error image."""
        if not self.attention:
            return x, error
        return (self.reader.read((x, error), self.reader.window(state.read_window)),)

    def decode(self, z: Tensor, state: StepState, weights: SequenceWeights) -> StepState:
        """Take a decoder step and write its patch to the canvas."""
        decoder = lstm_step(weights.decoder, state.decoder, z)
        read_window, write_window, patch = self._split_outputs(weights.outputs(decoder.h))
        if self.attention:
            patch = self.writer.write(patch, self.writer.window(write_window))
        return StepState(state.canvas + patch, state.encoder, decoder, read_window, write_window)

    @torch.no_grad()
    def generate(self, noise: Tensor) -> GeneratedImages:
        """Generate images from the prior: z is the noise, (T, B, latent)."""
        weights, canvases, boxes = self.weights(), [], []
        state = self.initial_state(noise.shape[1], weights)
        for z in noise.unbind():
            state = self.decode(z, state, weights)
            canvases.append(state.canvas.sigmoid().unflatten(1, (self.side, self.side)))
            boxes.append(self.written_box(state))
        return GeneratedImages(torch.stack(canvases), torch.stack(boxes))

    def written_box(self, state: StepState) -> Tensor:
        """Return the square of the last write: centre y, x and side, in pixels, (B, 3)."""
        if not self.attention:
            whole = state.canvas.new_tensor([self.side / 2 - 0.5] * 2 + [self.side - 1])
            return whole.expand(len(state.canvas), 3)
        centre, stride, *_ = self.writer.window(state.write_window)
        return torch.cat([centre, stride * (self.writer.size - 1)], 1)

    def initial_state(self, count: int, weights: SequenceWeights) -> StepState:
        """Return an empty canvas, zero LSTM states, and the windows they give."""
        zeros = weights.outputs.weight.new_zeros(count, self.hidden)
        read_window, write_window, _ = self._split_outputs(weights.outputs(zeros))
        canvas, lstm = zeros.new_zeros(count, self.side**2), LSTMState(zeros, zeros)
        return StepState(canvas, lstm, lstm, read_window, write_window)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile one step in place. The loop over steps is not compiled: unrolled, it would take
        minutes."""
        self.step = torch.compile(self.step, *args, **kwargs)  # type: ignore[method-assign]

    def _split_outputs(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the decoder's outputs into read window, write window and patch."""
        size = WINDOW_PARAMETERS if self.attention else 0
        read_window, write_window, patch = outputs.split(
            [size, size, outputs.shape[1] - 2 * size], 1
        )
        return read_window, write_window, patch


def kl_from_standard_normal(mean: Tensor, log_sigma: Tensor) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, 1)) = ½(μ² + σ² − 1) − log σ, elementwise."""
    return 0.5 * (mean.square() + (2 * log_sigma).exp() - 1) - log_sigma
