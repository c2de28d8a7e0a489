"""DRAW (Gregor et al. 2015) as github.com/jbornschein/draw has it: the model of section 5.3.

At each of T steps the encoder looks at the image x and at what the canvas c still lacks of it, a
latent z is drawn, and the decoder adds to the canvas:

    x̂ = x − sigmoid(c);  h_enc = LSTM([read(x, x̂, h_dec), h_dec]);
    z = μ(h_enc) + e^{log σ(h_enc)}·u;  h_dec = LSTM(z);  c = c + write(h_dec)

The h_dec that is read is the previous step's. Canvas, states and cells start at 0.

Note [once per sequence]
    A step works on tensors, not on layers: `DRAW.weights` reads every layer once and hands its
    weights to all T steps. So a normalized weight is computed once and differentiated once, and
    layers that read the same thing are one product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightnorm.lab.models.attention import NUMBERS, Attention

INIT_STD = 0.01


class Affine(NamedTuple):
    """x ↦ Wx + b, as tensors."""

    weight: Tensor
    bias: Tensor

    def __call__(self, *inputs: Tensor) -> Tensor:
        x = torch.cat(inputs, 1) if len(inputs) > 1 else inputs[0]
        return F.linear(x, self.weight, self.bias)


def stacked(*layers: nn.Linear) -> Affine:
    """Layers that read the same thing, as one: their outputs side by side."""
    return Affine(torch.cat([a.weight for a in layers]), torch.cat([a.bias for a in layers]))


class Cell(NamedTuple):
    """State and cell of an LSTM, (B, H) each."""

    h: Tensor
    c: Tensor


class CellWeights(NamedTuple):
    gates: Affine  # of [inputs, h]
    peepholes: Tensor


class PeepholeLSTM(nn.Module):
    """An LSTM whose gates see its cell through diagonal peepholes; the bias is the input's."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)
        self.peepholes = nn.Parameter(torch.empty(3, hidden))

    def weights(self) -> CellWeights:
        gates = torch.cat([self.input.weight, self.recurrent.weight], 1)
        return CellWeights(Affine(gates, self.input.bias), self.peepholes)


def lstm(weights: CellWeights, cell: Cell, *inputs: Tensor) -> Cell:
    """One step."""
    return gated(weights.gates(*inputs, cell.h), weights.peepholes, cell.c)


def gated(t: Tensor, peepholes: Tensor, c: Tensor) -> Cell:
    """i = σ(t_i + p_i c), f = σ(t_f + p_f c), c′ = f c + i tanh t_g, o = σ(t_o + p_o c′),
    h′ = o tanh c′."""
    size = c.shape[1]
    t_if, t_g, t_o = t.split([2 * size, size, size], 1)
    p_if, p_o = peepholes.split([2, 1])
    t_if = torch.addcmul(t_if.unflatten(1, (2, size)), p_if, c.unsqueeze(1))
    i, f = t_if.sigmoid().unbind(1)
    c = torch.addcmul(f * c, i, t_g.tanh())
    o = torch.addcmul(t_o, p_o, c).sigmoid()
    return Cell(o * c.tanh(), c)


class Weights(NamedTuple):
    """Everything the steps of a sequence share."""

    encoder: CellWeights
    code: Affine  # of h_enc: μ, log σ
    decoder: CellWeights
    out: Affine  # of h_dec: where to read next, where to write, what to write


class State(NamedTuple):
    """What a step hands to the next."""

    canvas: Tensor  # (B, side²), logits
    encoder: Cell
    decoder: Cell
    read: Tensor  # (B, 5): the window to read next
    write: Tensor  # (B, 5): the window last written to


class Bound(NamedTuple):
    """−ELBO of each example, in nats, in its two parts."""

    nll: Tensor
    """−log p(x | z), summed over pixels: (B,)."""
    kl: Tensor
    """KL(q(z | x) ‖ p(z)), summed over steps: (B,)."""

    @property
    def negative_elbo(self) -> Tensor:
        return self.nll + self.kl


class Drawing(NamedTuple):
    """How images came about, step by step."""

    canvases: Tensor
    """Probabilities of the pixels: (T, B, side, side)."""
    boxes: Tensor
    """Where the step wrote: centre y, x and side of the square its filters' means span, in pixels:
    (T, B, 3)."""


class DRAW(nn.Module):
    """DRAW on images of `side` × `side` zeros and ones.

    Args:
        hidden: units of the encoder's and of the decoder's LSTM.
        latent: length of z at each step.
        read_size: the grid that reads has this many filters along each axis; write_size: the one
            that writes.
        attention: else every pixel is read and written at each step.

    The number of steps is that of the noise.
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
            self.read_window, self.write_window = (nn.Linear(hidden, NUMBERS) for _ in range(2))
        self.ink = nn.Linear(hidden, (write_size if attention else side) ** 2)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=INIT_STD)

    def weights(self) -> Weights:
        """The weights as they are now; see Note [once per sequence]."""
        windows = (self.read_window, self.write_window) if self.attention else ()
        return Weights(
            self.encoder.weights(),
            stacked(self.mean, self.log_sigma),
            self.decoder.weights(),
            stacked(*windows, self.ink),
        )

    def forward(self, x: Tensor, noise: Tensor) -> Bound:
        """The bound for images (B, side²), with the posterior's noise (T, B, latent)."""
        weights, codes = self.weights(), []
        state = self.start(x.shape[0], weights)
        for u in noise.unbind():
            state, code = self.step(x, u, state, weights)
            codes.append(code)
        nll = F.binary_cross_entropy_with_logits(state.canvas, x, reduction="none").sum(1)
        mean, log_sigma = torch.stack(codes).chunk(2, 2)  # (T, B, latent)
        return Bound(nll, kl_from_standard_normal(mean, log_sigma).sum((0, 2)))

    def step(self, x: Tensor, u: Tensor, state: State, w: Weights) -> tuple[State, Tensor]:
        """Look, draw a latent, paint; also (μ, log σ), (B, 2 · latent)."""
        error = x - state.canvas.sigmoid()
        encoder = lstm(w.encoder, state.encoder, *self.look(x, error, state), state.decoder.h)
        code = w.code(encoder.h)
        mean, log_sigma = code.chunk(2, 1)
        z = torch.addcmul(mean, log_sigma.exp(), u)
        return self.paint(z, state._replace(encoder=encoder), w), code

    def look(self, x: Tensor, error: Tensor, state: State) -> tuple[Tensor, ...]:
        """What the encoder sees of the image and of what it lacks."""
        if not self.attention:
            return x, error
        return (self.reader.read((x, error), self.reader.window(state.read)),)

    def paint(self, z: Tensor, state: State, w: Weights) -> State:
        """What a latent makes of the canvas."""
        decoder = lstm(w.decoder, state.decoder, z)
        read, write, ink = self._laid(w.out(decoder.h))
        if self.attention:
            ink = self.writer.write(ink, self.writer.window(write))
        return State(state.canvas + ink, state.encoder, decoder, read, write)

    @torch.no_grad()
    def generate(self, noise: Tensor) -> Drawing:
        """Drawings from the prior: z is the noise, (T, B, latent)."""
        weights, canvases, boxes = self.weights(), [], []
        state = self.start(noise.shape[1], weights)
        for z in noise.unbind():
            state = self.paint(z, state, weights)
            canvases.append(state.canvas.sigmoid().unflatten(1, (self.side, self.side)))
            boxes.append(self.box(state))
        return Drawing(torch.stack(canvases), torch.stack(boxes))

    def box(self, state: State) -> Tensor:
        """The square last written to: centre y, x and side, in pixels."""
        if not self.attention:
            whole = state.canvas.new_tensor([self.side / 2 - 0.5] * 2 + [self.side - 1])
            return whole.expand(len(state.canvas), 3)
        centre, stride, *_ = self.writer.window(state.write)
        return torch.cat([centre, stride * (self.writer.size - 1)], 1)

    def start(self, count: int, w: Weights) -> State:
        """An empty canvas, and states at 0."""
        zeros = w.out.weight.new_zeros(count, self.hidden)
        read, write, _ = self._laid(w.out(zeros))
        canvas = zeros.new_zeros(count, self.side**2)
        return State(canvas, Cell(zeros, zeros), Cell(zeros, zeros), read, write)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the step in place. The loop over it stays as it is: unrolled, it would keep a
        compiler busy for minutes."""
        self.step = torch.compile(self.step, *args, **kwargs)  # type: ignore[method-assign]

    def _laid(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        numbers = NUMBERS if self.attention else 0
        read, write, ink = out.split([numbers, numbers, out.shape[1] - 2 * numbers], 1)
        return read, write, ink


def kl_from_standard_normal(mean: Tensor, log_sigma: Tensor) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, 1)) = ½(μ² + σ² − 1) − log σ, elementwise."""
    return 0.5 * (mean.square() + (2 * log_sigma).exp() - 1) - log_sigma
