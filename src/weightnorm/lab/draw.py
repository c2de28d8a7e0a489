"""Experiment 3: DRAW on binarized MNIST, standard against weight norm (section 5.3).

The recurrent model of Gregor et al. (2015), as implemented in github.com/jbornschein/draw and with
the hyperparameters of that implementation, with and without weight normalization of every matrix.
The paper gives neither the learning rate nor how g starts. Deviations and results:
docs/experiments/draw.md.

Note [noise of the whole batch]
    Every rank draws the noise of all examples of a step and uses that of its own. So the ranks'
    random states stay equal, and a run on several ranks equals one process, up to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrize

from weightnorm import Parameterization, folded, parts, weight_norm_model
from weightnorm.lab.config import TINY, Count, Positive, Range, RunConfig, Size
from weightnorm.lab.data import load_binarized_mnist, load_digits
from weightnorm.lab.records import RunRecord
from weightnorm.lab.run import Run
from weightnorm.lab.weights import mean_norms

NAME = "draw"
TITLE = "DRAW on binarized MNIST, standard and weight norm (section 5.3)"
METRIC = "train_negative_elbo"
"""Selects the best learning rate of a sweep, lower is better. Test bounds are not used for that."""
RESULTS = ("train_negative_elbo", "test_negative_elbo", "test_kl")
"""Metrics of every result: those that `sweep --metric` accepts."""
EVAL_BATCH = 500
SAMPLES, DRAWINGS = 100, 8
"""Generated images that are stored for the report; how many of them with every step."""


@dataclass(frozen=True)
class Config(RunConfig):
    """Train DRAW, a recurrent VAE with attention."""

    # Defaults without a source are the settings that the README of github.com/jbornschein/draw
    # gives for MNIST.

    parameterization: Parameterization = Parameterization.WEIGHT_NORM
    """Only standard and weight-norm apply to this model."""
    learning_rate: Positive = 0.0003
    """Adam's learning rate, the same for both parameterizations as in section 5.3."""
    data: Literal["binarized-mnist", "digits"] = "binarized-mnist"
    """The fixed binarization of MNIST, or scikit-learn's embedded digits thresholded at ½."""
    epochs: Count = 100
    """Passes over the training set."""
    batch_size: Size = 100
    """Examples per step, over all ranks."""
    steps: Size = 64
    """Time steps T of the recurrent model."""
    hidden: Size = 256
    """Units of the encoder's and of the decoder's LSTM."""
    latent: Size = 100
    """Dimension of the latent vector at each step."""
    attention: bool = True
    """Read and write through a grid of Gaussian filters; without it, all pixels at each step."""
    read_size: Annotated[int, Range(2, 1000)] = 2
    """Filters along each axis of the read grid."""
    write_size: Annotated[int, Range(2, 1000)] = 5
    """Filters along each axis of the write grid."""
    initial_g: Literal["norm", "one", "one-except-windows"] = "norm"
    """Initial g of weight norm: ‖v‖, which keeps the initial weights; 1; or 1 except in the
    units that place the attention windows, which keep ‖v‖. Not used by the standard
    parameterization."""
    clip: Annotated[float, Range(TINY, math.inf, "above 0")] = 10.0
    """Largest gradient norm over all parameters; longer gradients are scaled down to it."""
    limit: Count | None = None
    """Train on only this many examples, from the start of the training set."""

    COMPARED: ClassVar = (Parameterization.STANDARD, Parameterization.WEIGHT_NORM)

    def __post_init__(self) -> None:
        super().__post_init__()
        # One run, whatever g is given in a sweep.
        if self.parameterization != Parameterization.WEIGHT_NORM:
            object.__setattr__(self, "initial_g", "norm")


PAPER = Config(about="64 steps, 256 units, 100 epochs, a GPU, days")
PRESETS = {
    "paper": PAPER,
    "cpu": replace(
        PAPER,
        preset="cpu",
        about="16 steps, 256 units, 20 epochs, two cores, about 25 minutes",
        learning_rate=0.001,
        steps=16,
        read_size=5,
        epochs=20,
    ),
    "demo": replace(
        PAPER,
        preset="demo",
        about="8 steps, 64 units, embedded digits, a minute",
        learning_rate=0.003,
        data="digits",
        epochs=40,
        batch_size=50,
        steps=8,
        hidden=64,
        latent=16,
        write_size=3,
    ),
}


# — the network —


class DRAW(nn.Module):
    """DRAW on binary images of `side` × `side` pixels. At each of T steps

        x̂ = x − sigmoid(c);  h_enc = LSTM([read(x, x̂), h_dec]);
        z = μ(h_enc) + e^{log σ(h_enc)}·u;  h_dec = LSTM(z);  c ← c + write(h_dec)

    with the image x, the canvas c, noise u, and in the first line the h_dec of the previous step,
    which also places the read window. Canvas and LSTM states are initially 0.

    The number of steps is given by the noise. Each step calls every layer, so the network is meant
    to be called under `torch.nn.utils.parametrize.cached()`, or folded: each normalized weight is
    then computed once per sequence.
    """

    def __init__(self, config: Config, side: int = 28) -> None:
        super().__init__()
        hidden, latent = config.hidden, config.latent
        self.side, self.hidden = side, hidden
        self.reader, self.writer = (
            Attention(size, side) if config.attention else AllPixels(side)
            for size in (config.read_size, config.write_size)
        )
        self.encoder = PeepholeLSTM(2 * self.reader.pixels + hidden, hidden)
        self.code = nn.Linear(hidden, 2 * latent)  # μ and log σ of z
        self.decoder = PeepholeLSTM(latent, hidden)
        self.output_sizes = [self.reader.inputs, self.writer.inputs, self.writer.pixels]
        self.outputs = nn.Linear(hidden, sum(self.output_sizes))  # next read, write, patch
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.01)  # weights and peepholes

    def forward(self, x: Tensor, noise: Tensor) -> Bound:
        """Return the bound for images (B, side²), given the posterior's noise (T, B, latent)."""
        state, codes = self.initial_state(noise), []
        for u in noise.unbind():
            state, code = self.step(x, u, state)
            codes.append(code)
        nll = F.binary_cross_entropy_with_logits(state.canvas, x, reduction="none").sum(1)
        mean, log_sigma = torch.stack(codes).chunk(2, 2)  # (T, B, latent)
        return Bound(nll, kl_from_standard_normal(mean, log_sigma).sum((0, 2)))

    def step(self, x: Tensor, u: Tensor, state: State) -> tuple[State, Tensor]:
        """Read, sample z and write. Return the next state and (μ, log σ), (B, 2·latent)."""
        error = x - state.canvas.sigmoid()
        glimpse = self.reader.read((x, error), state.read_window)
        encoder = self.encoder(torch.cat([glimpse, state.decoder.h], 1), state.encoder)
        code = self.code(encoder.h)
        mean, log_sigma = code.chunk(2, 1)
        z = torch.addcmul(mean, log_sigma.exp(), u)
        return self.decode(z, state._replace(encoder=encoder)), code

    def decode(self, z: Tensor, state: State) -> State:
        """Take a decoder step and write its patch to the canvas."""
        decoder = self.decoder(z, state.decoder)
        read_window, write_window, patch = self.outputs(decoder.h).split(self.output_sizes, 1)
        canvas = state.canvas + self.writer.write(patch, write_window)
        return State(canvas, state.encoder, decoder, read_window, write_window)

    def initial_state(self, noise: Tensor) -> State:
        """Return an empty canvas, zero LSTM states, and the windows they give."""
        zeros = noise.new_zeros(noise.shape[1], self.hidden)
        canvas, lstm = zeros.new_zeros(len(zeros), self.side**2), LSTMState(zeros, zeros)
        read_window, write_window, _ = self.outputs(zeros).split(self.output_sizes, 1)
        return State(canvas, lstm, lstm, read_window, write_window)

    @torch.no_grad()
    def generate(self, noise: Tensor) -> GeneratedImages:
        """Generate images from the prior: z is the noise, (T, B, latent)."""
        state, canvases, boxes = self.initial_state(noise), [], []
        for z in noise.unbind():
            state = self.decode(z, state)
            canvases.append(state.canvas.sigmoid().unflatten(1, (self.side, self.side)))
            boxes.append(self.writer.box(state.write_window))
        return GeneratedImages(torch.stack(canvases), torch.stack(boxes))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile one step in place. The loop over steps is not compiled: unrolled, it would take
        minutes."""
        self.step = torch.compile(self.step, *args, **kwargs)  # type: ignore[method-assign]


class PeepholeLSTM(nn.Module):
    """An LSTM with diagonal peepholes p and one bias. With t = Wx + b + Uh for each gate:

    i = σ(t_i + p_i c), f = σ(t_f + p_f c), c′ = f c + i tanh t_g, o = σ(t_o + p_o c′),
    h′ = o tanh c′.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)
        self.peepholes = nn.Parameter(torch.empty(3, hidden))

    def forward(self, x: Tensor, state: LSTMState) -> LSTMState:
        h, c = state
        t_i, t_f, t_g, t_o = (self.input(x) + self.recurrent(h)).chunk(4, 1)
        p_i, p_f, p_o = self.peepholes
        i, f = (t_i + p_i * c).sigmoid(), (t_f + p_f * c).sigmoid()
        c = f * c + i * t_g.tanh()
        o = (t_o + p_o * c).sigmoid()
        return LSTMState(o * c.tanh(), c)


class Attention(nn.Module):
    """Reads from and writes to images of `side` × `side` pixels with N × N Gaussian filters.

    Five inputs place the grid of filters, (p_y, p_x, log δ, log σ², log γ):

    - its centre is (p + 1)/2 · side, in pixels, and its stride δ · (side − 1)/(N − 1);
    - filter i of an axis has mean centre + (i − N/2 + ½) · stride and variance σ²; its weights on
      the pixels are divided by their sum + 10⁻⁴, so that one outside of the image reads 0;
    - a patch that is read is multiplied by γ, one that is written is divided by it.
    """

    inputs = 5
    offsets: Tensor
    positions: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(self, size: int, side: int) -> None:
        super().__init__()
        self.size, self.side, self.pixels = size, side, size**2
        constants = {
            "offsets": torch.arange(size).unsqueeze(1) - size / 2 + 0.5,  # (N, 1), in strides
            "positions": torch.arange(float(side)),
            # inputs · scale + shift = (centre y, x, log δ, log 1/σ², log γ)
            "scale": torch.tensor([side / 2, side / 2, 1, -1, 1]),
            "shift": torch.tensor([side / 2, side / 2, 0, 0, 0]),
        }
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def window(self, inputs: Tensor) -> Window:
        """Return the windows that the inputs (B, 5) describe."""
        centre, logs = torch.addcmul(self.shift, inputs, self.scale).split([2, 3], 1)
        delta, precision, gamma = logs.exp().split(1, 1)
        return Window(centre, delta * ((self.side - 1) / (self.size - 1)), precision, gamma)

    def filters(self, window: Window) -> tuple[Tensor, Tensor]:
        """Return the filterbanks F_y and F_x, (B, N, side) each."""
        stride, precision = (t.view(-1, 1, 1, 1) for t in (window.stride, window.precision))
        mean = window.centre[:, :, None, None] + stride * self.offsets  # (B, 2, N, 1)
        weights = (-0.5 * precision * (self.positions - mean).square()).exp()  # (B, 2, N, side)
        y, x = (weights / (weights.sum(-1, keepdim=True) + 1e-4)).unbind(1)
        return y, x

    def read(self, images: tuple[Tensor, ...], inputs: Tensor) -> Tensor:
        """Return the patches γ · F_y image F_xᵀ, concatenated: k images (B, side²) → (B, k·N²)."""
        window = self.window(inputs)
        y, x = self.filters(window)
        patches = [(y @ image.view(-1, self.side, self.side) @ x.mT).flatten(1) for image in images]
        return torch.cat(patches, 1) * window.gamma

    def write(self, patch: Tensor, inputs: Tensor) -> Tensor:
        """Return F_yᵀ patch F_x / γ: (B, N²) → (B, side²)."""
        window = self.window(inputs)
        y, x = self.filters(window)
        patch = (patch / window.gamma).view(-1, self.size, self.size)
        return (y.mT @ (patch @ x)).flatten(1)

    def box(self, inputs: Tensor) -> Tensor:
        """Return the square that the filters' means span: centre y, x and side, (B, 3)."""
        window = self.window(inputs)
        return torch.cat([window.centre, window.stride * (self.size - 1)], 1)


class AllPixels(nn.Module):
    """Reads and writes all pixels of an image: DRAW without attention."""

    inputs = 0

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side, self.pixels = side, side**2

    def read(self, images: tuple[Tensor, ...], inputs: Tensor) -> Tensor:
        """Return the images, concatenated."""
        return torch.cat(images, 1)

    def write(self, patch: Tensor, inputs: Tensor) -> Tensor:
        """Return the patch, which has all pixels."""
        return patch

    def box(self, inputs: Tensor) -> Tensor:
        """Return the square of all pixels: centre y, x and side, (B, 3)."""
        whole = inputs.new_tensor([self.side / 2 - 0.5] * 2 + [self.side - 1])
        return whole.expand(len(inputs), 3)


class LSTMState(NamedTuple):
    """Hidden state and cell state of an LSTM, (B, H) each."""

    h: Tensor
    c: Tensor


class State(NamedTuple):
    """State between two steps."""

    canvas: Tensor  # (B, side²), logits
    encoder: LSTMState
    decoder: LSTMState
    read_window: Tensor  # (B, 5): inputs of the next read
    write_window: Tensor  # (B, 5): inputs of the last write


class Window(NamedTuple):
    """Position, scale and intensity of the filter grids of a batch, in pixels."""

    centre: Tensor  # (B, 2): y, x
    stride: Tensor  # (B, 1)
    precision: Tensor  # (B, 1): 1/σ²
    gamma: Tensor  # (B, 1)


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


def kl_from_standard_normal(mean: Tensor, log_sigma: Tensor) -> Tensor:
    """KL(N(μ, σ²) ‖ N(0, 1)) = ½(μ² + σ² − 1) − log σ, elementwise."""
    return 0.5 * (mean.square() + (2 * log_sigma).exp() - 1) - log_sigma


@torch.no_grad()
def normalize(model: DRAW, initial_g: str) -> None:
    """Normalize every matrix, with the initial g that `Config.initial_g` describes."""
    weight_norm_model(model)
    if initial_g == "norm":
        return
    windows = model.reader.inputs + model.writer.inputs if "windows" in initial_g else 0
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            parts(layer).g[windows if layer is model.outputs else 0 :] = 1.0


# — training —


def run(config: Config, console: Console | None = None) -> RunRecord:
    """Train and evaluate one model, and return its record."""
    with Run(NAME, config, PRESETS, console, RESULTS) as run:
        if (record := run.finished) is not None:
            return record
        train, test = (images.to(run.device) for images in load(config))

        model = DRAW(config, math.isqrt(train.shape[1]))
        if config.parameterization.normalizes_weights:
            normalize(model, config.initial_g)
        model.to(run.device)
        if config.compile:
            model.compile()

        optimizer = torch.optim.Adam(model.parameters(), lr=config.rate, fused=True)
        if not run.restore(model=model, optimizer=optimizer):
            torch.manual_seed(~config.seed)  # see Note [noise of the whole batch]

        for epoch in run.epochs(config.epochs):
            for rows in run.batches(len(train), config.batch_size):
                x, noise = train[rows].float(), posterior_noise(run.batch, config, run)
                with parametrize.cached():  # each weight is computed once per sequence
                    bound = model(x, noise)
                loss = bound.negative_elbo.sum() / run.batch
                optimizer.zero_grad()
                loss.backward()
                run.ranks.sum_gradients(model)
                gradient_norm = clip_grad_norm_(model.parameters(), config.clip)
                optimizer.step()
                run.add(
                    negative_elbo=loss * run.batch,
                    kl=bound.kl.sum(),
                    gradient_norm=gradient_norm * len(rows),
                    count=len(rows),
                )

            test_negative_elbo, test_kl = evaluate(model, test, config, run)
            names = ("negative_elbo", "kl", "gradient_norm")
            run.log(
                **{f"train_{name}": run.mean(name) for name in names},
                test_negative_elbo=test_negative_elbo,
                test_kl=test_kl,
                **mean_norms(model),
            )
            if epoch + 1 in (config.epochs // 2, config.epochs):
                store_samples(model, config, run)
        return run.finish({name: run.last[name] for name in RESULTS})


def load(config: Config) -> tuple[Tensor, Tensor]:
    """Load the binary training and test images: uint8, (N, side²)."""
    if config.data == "digits":
        raw = load_digits()
        train, test = ((images > 128).to(torch.uint8) for images in (raw.train, raw.test))
    else:
        images = load_binarized_mnist(config.data_dir)
        train, test = images.train, images.test
    return train[: config.limit].flatten(1), test.flatten(1)


def posterior_noise(count: int, config: Config, run: Run) -> Tensor:
    """Return this rank's part of the noise of `count` examples: (steps, B, latent)."""
    noise = torch.randn(count, config.steps, config.latent, device=run.device)
    return run.ranks.share(noise).transpose(0, 1)


def evaluate(model: DRAW, images: Tensor, config: Config, run: Run) -> tuple[float, float]:
    """Return the means of −ELBO and of its KL term on the test set, in nats."""

    def sums(x: Tensor) -> Tensor:
        bound = model(x.float(), posterior_noise(run.batch, config, run))
        return torch.stack([bound.negative_elbo.sum(), bound.kl.sum()])

    with folded(model):
        negative_elbo, kl = run.evaluate(sums, EVAL_BATCH, images)
    return negative_elbo, kl


def store_samples(model: DRAW, config: Config, run: Run) -> None:
    """Store generated images, some of them with every step and the square it wrote to.

    The noise is the same at every call and for every parameterization.
    """
    generator = torch.Generator().manual_seed(config.seed)
    z = torch.randn(config.steps, SAMPLES, config.latent, generator=generator).to(run.device)
    with folded(model):
        generated = model.generate(z)
    pixels = (255 * generated.canvases).round().to(torch.uint8)
    run.save_arrays(
        f"epoch-{run.epoch + 1}",
        samples=pixels[-1],
        drawings=pixels[:, :DRAWINGS],
        boxes=generated.boxes[:, :DRAWINGS],
    )
