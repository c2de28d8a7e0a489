"""Experiment 5: a byte-level language model, with and without weight norm in the optimizer.

Not in the paper. Does training length and direction separately speed up a transformer? Compared on
the matrices of the blocks, plain or weight-normalized; AdamW trains everything else:

- AdamW, and AdamW on v and g;
- Muon, and Muon on v with AdamW on g, at a rate of its own;
- Muown as published (arXiv 2605.10797, github.com/kcc-lion/muown): eq. 3 gives ∇v and ∇g; Muon with
  steps of 0.2·√max(rows, columns)·lr moves v, and Adam with the same lr moves g, which starts at
  ‖w‖. There everything else has the same lr too, and weight decay, here 0 by default and applied
  to w before the step, is applied after it;
- Hyperball (arXiv 2606.16899): Adam on matrices of fixed norm.

Results: docs/experiments/language.md.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from math import log
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from weightnorm import Parameterization, WeightNormOptimizer, functional
from weightnorm.lab.config import Count, Nonnegative, Positive, Probability, RunConfig, Several
from weightnorm.lab.environment import autocast
from weightnorm.lab.errors import ConfigError, DataError, require
from weightnorm.lab.records import RunRecord, read_json, write_json
from weightnorm.lab.run import Run
from weightnorm.lab.weights import direction_angle, mean_norms, weight_rows

NAME = "language"
TITLE = "Transformer with weight norm in its optimizer (not in the paper)"
METRIC = "train_bits_per_byte"
"""Selects the best learning rate of a sweep, lower is better. Held-out text has no part in it."""
RESULTS = ("train_bits_per_byte", "test_bits_per_byte", "trigram_bits_per_byte")
"""Metrics of every result: those that `sweep --metric` accepts."""
AXES = {"optimizers": "optimizer"}
"""Flags of `sweep` for fields that may have several values."""


def leaves_out(fields: dict[str, Any]) -> bool:
    """Whether a sweep has no run with these fields: the optimizer is one for normalized weights."""
    standard = not fields["parameterization"].normalizes_weights
    return standard and fields["optimizer"] in ("muown", "hyperball")


@dataclass(frozen=True)
class Config(RunConfig):
    """Train a byte-level transformer on the Python source of torch."""

    parameterization: Parameterization = Parameterization.WEIGHT_NORM
    """Only standard and weight-norm apply to this model."""
    preset: Literal["cpu", "demo"] = "cpu"
    """Defaults of the other fields: 15 to 30 minutes on one core, or a minute."""
    optimizer: Literal["adamw", "muon", "muown", "hyperball"] = "adamw"
    """Optimizer of the blocks' matrices. muown is Muon on v and Adam on g as published, hyperball
    is Adam on matrices of fixed norm."""
    epochs: Count = 10
    """Evaluations: one after every `steps` steps."""
    steps: Count = 100
    """Training steps between evaluations."""
    batch_size: Count = 16
    """Texts per step, over all ranks."""
    context: Several = 256
    """Bytes of a text."""
    width: Count = 192
    """Units of the residual stream."""
    depth: Count = 4
    """Transformer blocks."""
    heads: Count = 6
    """Attention heads."""
    other_learning_rate: Positive = 0.003
    """Initial step size of embeddings, gains and the output layer."""
    length_learning_rate: Positive | None = None
    """Initial step size of g; by default 0.005 under adamw, 0.1 under muon, and the learning rate
    under muown."""
    weight_decay: Nonnegative | None = None
    """Decoupled weight decay of the blocks' matrices; by default 0.1, with weight norm 0."""
    initial_g: Literal["norm", "one"] = "norm"
    """Initial g of weight norm: ‖w‖ of the initial weights, which keeps them, or 1."""
    retract: bool = False
    """Restore ‖v‖ after every step, so that it does not grow."""
    warmup: Probability = 0.05
    """Fraction of the steps in which the learning rate rises; afterwards it falls linearly to 0."""
    eval_texts: Count = 256
    """Held-out texts for each evaluation."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of the network (autocast); parameters are float32."""

    FOLDER_FIELDS: ClassVar[tuple[str, ...]] = ("optimizer", "parameterization")

    COMPARED: ClassVar = (Parameterization.STANDARD, Parameterization.WEIGHT_NORM)

    def __post_init__(self) -> None:
        super().__post_init__()
        how, normalizes = self.parameterization, self.parameterization.normalizes_weights
        require(not leaves_out(vars(self)), "parameterization", how,
                f"weight-norm: {self.optimizer} is for normalized weights")  # fmt: skip
        require(normalizes or not self.retract, "retract", True, "False without weight norm")
        # Without effect there: runs with other values would be copies.
        if not normalizes or self.optimizer == "hyperball":
            object.__setattr__(self, "length_learning_rate", None)
            object.__setattr__(self, "initial_g", "norm")
        if self.optimizer == "hyperball":
            object.__setattr__(self, "weight_decay", None)
            object.__setattr__(self, "retract", False)
        divides = self.width % self.heads == 0 and self.width // self.heads % 2 == 0
        expected = f"a divisor of {self.width} with heads of an even size"
        require(divides, "heads", self.heads, expected)

    @property
    def default_rate(self) -> float:
        """The best of a few rates at 300 to 1,000 steps; that of muown as muon's."""
        muon = 0.05 if self.parameterization.normalizes_weights else 0.02
        return {"adamw": 0.005, "muon": muon, "muown": 0.02, "hyperball": 0.01}[self.optimizer]

    @property
    def length_rate(self) -> float:
        """The initial step size of g; hyperball does not train g."""
        defaults = {"adamw": 0.005, "muon": 0.1}
        return self.length_learning_rate or defaults.get(self.optimizer, self.rate)

    @property
    def decay(self) -> float:
        """The weight decay of the blocks' matrices."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.0 if self.parameterization.normalizes_weights else 0.1


CPU = Config(about="1.9 million parameters, 1,000 steps, one core, 15 to 30 minutes")
PRESETS = {
    "cpu": CPU,
    "demo": replace(
        CPU,
        preset="demo",
        about="0.3 million parameters, 1,000 steps, a minute",
        batch_size=8,
        context=128,
        width=96,
        depth=2,
        eval_texts=64,
    ),
}

# — the network: a decoder with rotary positions, RMS norm before each branch, no biases —

BYTES = 256


class SelfAttention(nn.Module):
    """Causal self-attention with rotary positions (Su et al. 2021)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, T, D)
            for project in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(
            rotate(q, rotation), rotate(k, rotation), v, is_causal=True
        )
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = SelfAttention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), rotation)
        down: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + down


class Transformer(nn.Module):
    """Predict each byte of a text from the bytes before it.

    Weights start at N(0, 1/fan_in); those that end a residual branch are divided by √(2·depth).
    """

    rotation: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        width, heads, depth = config.width, config.heads, config.depth
        self.embedding = nn.Embedding(BYTES, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        angles = rotations(config.context, width // heads)
        self.register_buffer("rotation", angles, persistent=False)
        nn.init.normal_(self.embedding.weight)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                if name.endswith(("out", "down")):
                    std *= (2 * depth) ** -0.5
                nn.init.normal_(module.weight, std=std)

    def forward(self, text: Tensor) -> Tensor:
        """(B, T) bytes → logits of the bytes that follow, (B, T, 256)."""
        x = self.embedding(text.long())  # (B, T, width)
        rotation = self.rotation[: text.shape[1]]
        for block in self.blocks:
            x = block(x, rotation)
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotations(context: int, size: int, base: float = 10_000.0) -> Tensor:
    """Angles of rotary positions as (cos, sin): (context, size / 2, 2)."""
    frequency = base ** (-torch.arange(0, size, 2) / size)
    angle = torch.arange(context)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], -1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate pairs (xᵢ, xᵢ₊ₙ) of (…, T, 2n) by the angles of their positions.

    The product of two rotated vectors depends on the difference of their positions alone.
    """
    a, b = x.chunk(2, -1)
    cos, sin = rotation.unbind(-1)  # (T, n)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


# — the corpus: the Python source of the installed torch package —
#
# The files are taken in sorted order of their paths. One in ten is held out for evaluation, chosen
# by a hash of its path, so that a file stays on the same side in every version of torch.


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to evaluate on."""

    train: Tensor
    """(N,), uint8."""
    test: Tensor
    digest: str
    """SHA-256 of both parts."""
    version: str
    """Version of the torch package they were read from."""


def load_torch_source(root: Path | None = None, version: str = torch.__version__) -> Corpus:
    """Read the Python source below `root`, by default that of the installed torch package."""
    root = Path(torch.__file__).parent if root is None else root
    files = sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in files:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        parts[is_held_out(path.relative_to(root).as_posix())].append(text)
    train, test = (b"".join(parts[held_out]) for held_out in (False, True))
    if not train or not test:
        raise DataError(
            f"found {len(files)} Python files below {root}, expected those of a torch package; "
            "install torch from a wheel that contains its source"
        )
    digest = hashlib.sha256(train + b"\0" + test).hexdigest()
    return Corpus(_tensor(train), _tensor(test), digest, version)


def is_held_out(path: str) -> bool:
    """Whether a file, given by its path relative to the package, is held out.

    >>> [is_held_out(path) for path in ("nn/functional.py", "_ops.py")]
    [False, False]
    """
    return hashlib.sha256(path.encode()).digest()[0] % 10 == 0


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def trigram_bits_per_byte(corpus: Corpus) -> float:
    """Bits per byte of the held-out part under a trigram model of the training part.

    p(c | ab) interpolates relative frequencies of trigrams, bigrams and bytes (Witten & Bell 1991):
    p(c | h) = (n(hc) + t(h)·p(c | h′)) / (n(h) + t(h)), with t(h) the number of different bytes
    seen after h and h′ the shorter context.
    """
    train, test = (x.long() for x in (corpus.train, corpus.test))
    p = torch.full((256,), 1 / 256, dtype=torch.float64)
    for order in range(3):
        counts = _counts(train, order)  # (256^order, 256)
        kinds = (counts > 0).sum(1, keepdim=True)
        total = counts.sum(1, keepdim=True) + kinds
        shorter = p.reshape(-1, 256).repeat(counts.shape[0] // p.reshape(-1, 256).shape[0], 1)
        seen = (counts + kinds * shorter) / total.clamp_min(1)
        p = torch.where(total > 0, seen, shorter)
    index = test[:-2] * 65_536 + test[1:-1] * 256 + test[2:]
    return -p.flatten()[index].log2().mean().item()


def _counts(text: Tensor, order: int) -> Tensor:
    """How often each byte follows each context of `order` bytes: (256^order, 256)."""
    size = len(text) - order
    index = sum(text[i : i + size] * 256 ** (order - i) for i in range(order + 1))
    assert isinstance(index, Tensor)
    counts = torch.bincount(index, minlength=256 ** (order + 1)).double()
    return counts.view(256**order, 256)


# — training —


def run(config: Config, console: Console | None = None, corpus: Corpus | None = None) -> RunRecord:
    """Train and evaluate one transformer, and return its record. `corpus` replaces torch's
    source."""
    with Run(NAME, config, PRESETS, console, RESULTS) as run:
        if (record := run.finished) is not None:
            return record
        corpus = load_torch_source() if corpus is None else corpus
        check_size(corpus, config)
        record_corpus(corpus, run)
        train, test = corpus.train.to(run.device), held_out(corpus, config).to(run.device)

        model = Transformer(config).to(run.device)
        network: Any = torch.compile(model) if config.compile else model
        optimizers = build_optimizers(model, config)
        bases = [group["lr"] for group in groups_of(optimizers)]
        named = {f"optimizer{i}": optimizer for i, optimizer in enumerate(optimizers)}
        run.restore(model=model, **named)

        for epoch in run.epochs(config.epochs):
            for step in run.steps(config.steps):
                factor = schedule(epoch * config.steps + step, config)
                for group, base in zip(groups_of(optimizers), bases, strict=True):
                    group["lr"] = base * factor
                run.batch = config.batch_size
                texts = sample(train, epoch * config.steps + step, config, run)  # (B, T + 1)
                with autocast(run.device, config.precision):
                    loss = nats(network, texts) / (run.batch * config.context)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                run.ranks.sum_gradients(model)
                before = weight_rows(model.blocks) if step + 1 == config.steps else {}
                for optimizer in optimizers:
                    optimizer.step()
                run.add(nats=loss * run.batch, count=len(texts))
            run.log(
                train_bits_per_byte=run.mean("nats") / log(2),
                test_bits_per_byte=evaluate(network, test, config, run),
                learning_rate=bases[0] * factor,
                **norms(model, optimizers[0], before),
            )
        trigram = trigram_bits_per_byte(corpus)  # of all held-out text
        return run.finish({name: run.last.get(name, trigram) for name in RESULTS})


def build_optimizers(model: Transformer, config: Config) -> list[torch.optim.Optimizer]:
    """Return the optimizers of all parameters, that of the blocks' matrices first."""
    betas = (0.9, 0.95)
    kinds: dict[str, Any] = {
        "adamw": partial(torch.optim.AdamW, betas=betas),
        "muon": torch.optim.Muon,
        "muown": partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw"),
        "hyperball": partial(torch.optim.Adam, betas=betas),
    }
    inner = partial(kinds[config.optimizer], lr=config.rate, weight_decay=config.decay)
    others = partial(torch.optim.AdamW, lr=config.other_learning_rate, weight_decay=0.0)
    matrices = [m.weight for m in model.blocks.modules() if isinstance(m, nn.Linear)]

    if not config.parameterization.normalizes_weights:
        chosen = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        return [inner(matrices), others(rest)]

    if config.initial_g == "one":
        with torch.no_grad():
            for w in matrices:
                w.div_(functional.norm(w))
    options: dict[str, Any]
    if config.optimizer == "hyperball":  # one norm per matrix, fixed; steps of length lr·‖v‖
        options = {"dim": None, "train_g": False, "retract": True}
        options |= {"project": False, "normalize_update": True}
    else:
        adam = partial(torch.optim.AdamW, betas=betas, weight_decay=0.0)
        lengths = partial(adam, lr=config.length_rate)
        options = {"weight_decay_on": "w", "retract": config.retract, "lengths": lengths}
    return [WeightNormOptimizer(model, inner, where=in_blocks, others=others, **options)]


def in_blocks(name: str, module: nn.Module) -> bool:
    """Whether a layer is a matrix of a block: embedding and output layer are left plain."""
    return name.startswith("blocks.")


def groups_of(optimizers: list[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def schedule(step: int, config: Config) -> float:
    """Return the factor of the learning rates at a step: linear to 1, then linear to 0.

    >>> [schedule(step, Config(epochs=2, steps=5, warmup=0.2)) for step in (0, 1, 2, 9)]
    [0.5, 1.0, 1.0, 0.125]
    """
    total = config.epochs * config.steps
    warmup = round(config.warmup * total)
    if step < warmup:
        return (step + 1) / warmup
    return (total - step) / max(total - warmup, 1)


def sample(train: Tensor, step: int, config: Config, run: Run) -> Tensor:
    """Return this rank's texts of a step, one byte longer than the context: (B, context + 1)."""
    generator = torch.Generator().manual_seed((config.seed * 1_000_003 + step) % 2**63)
    last = len(train) - config.context
    starts = torch.randint(last, (config.batch_size,), generator=generator).to(train.device)
    return windows(train, run.ranks.share(starts), config.context)


def windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    """Return text[start : start + context + 1] of every start."""
    return text[starts[:, None] + torch.arange(context + 1, device=text.device)]


def nats(network: Any, texts: Tensor) -> Tensor:
    """Return the cross-entropy of each byte given those before it, summed over all, in nats."""
    logits = network(texts[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten().long(), reduction="sum")


def held_out(corpus: Corpus, config: Config) -> Tensor:
    """Return held-out texts at equal distances: (eval_texts, context + 1)."""
    last = len(corpus.test) - config.context - 1
    starts = torch.linspace(0, last, config.eval_texts).long()
    return windows(corpus.test, starts, config.context)


def evaluate(network: Any, texts: Tensor, config: Config, run: Run) -> float:
    """Return bits per byte of held-out texts."""
    with autocast(run.device, config.precision):
        (loss,) = run.evaluate(lambda x: nats(network, x)[None], config.batch_size, texts)
    return loss / config.context / log(2)


@torch.no_grad()
def norms(
    model: Transformer, optimizer: torch.optim.Optimizer, before: dict[str, Tensor]
) -> dict[str, float]:
    """Return means over the units of the blocks' matrices: ‖w‖, the angle of the last step in
    radians, and for weight norm ‖v‖ and g/‖v‖."""
    angles = torch.cat([*direction_angle(model.blocks, before).values()])
    means = mean_norms(model.blocks) | {"step_angle": angles.mean().item()}
    if isinstance(optimizer, WeightNormOptimizer):
        weights = optimizer.normalized().values()
        steps = [(weight.parts.g.abs() / weight.v_norm).flatten() for weight in weights]
        means["v_norm"] = torch.cat([weight.v_norm.flatten() for weight in weights]).mean().item()
        means["effective_step"] = torch.cat(steps).mean().item()
    return means


def check_size(corpus: Corpus, config: Config) -> None:
    """Raise a ConfigError if the corpus is too short for the config."""
    shortest = min(len(corpus.train), len(corpus.test))
    require(config.context < shortest - 1, "context", config.context,
            f"at most {shortest - 2}: the corpus has {len(corpus.train):,} bytes to train on and "
            f"{len(corpus.test):,} held out")  # fmt: skip


def record_corpus(corpus: Corpus, run: Run) -> None:
    """Record which text the run is trained on, and refuse to resume it on another one."""
    facts = {
        "sha256": corpus.digest,
        "torch": corpus.version,
        "train_bytes": len(corpus.train),
        "test_bytes": len(corpus.test),
    }
    path = run.folder / "corpus.json"
    if run.ranks.first and not path.exists():
        write_json(path, facts)
    run.ranks.gather()
    if (known := read_json(path)) != facts:
        raise ConfigError(
            f"{run.folder} was started with the source of torch {known.get('torch')} (SHA-256 "
            f"{known.get('sha256')}); this is torch {corpus.version} with another text (SHA-256 "
            f"{corpus.digest}). Resume it with the same installation, or choose another --out "
            "folder"
        )
