"""What the report shows of each experiment: metrics, published values, what is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd

from weightnorm.lab.report import pictures
from weightnorm.lab.report.pictures import Picture
from weightnorm.lab.report.style import STYLES, Style

Config = Mapping[str, Any]


class Metric(NamedTuple):
    """How a recorded metric is shown."""

    label: str
    scale: float = 1
    digits: int = 2


METRICS = {
    "train_error": Metric("training error, %", 100),
    "test_error": Metric("test error, %", 100),
    "train_negative_elbo": Metric("training bound, nats", -1),
    "test_negative_elbo": Metric("test bound, nats", -1),
    "test_bits_per_dim": Metric("test bits per dimension"),
    "importance_negative_log_likelihood": Metric("log p(x), nats", -1),
    "importance_negative_elbo": Metric("its bound, nats", -1),
    "train_bits_per_byte": Metric("bits per byte of training text", digits=3),
    "test_bits_per_byte": Metric("bits per byte of held-out text", digits=3),
    "best_score": Metric("best epoch's score", digits=0),
    "score": Metric("score in testing", digits=0),
    "train_score": Metric("score in training", digits=0),
    "mean_q": Metric("estimated values, max Q of initial states"),
    "loss": Metric("Huber loss of a transition"),
    "v_norm": Metric("‖v‖, mean over units"),
    "w_norm": Metric("‖w‖, mean over units"),
    "effective_step": Metric("effective step g/‖v‖, mean over units"),
    "step_angle": Metric("angle of a step, radians, mean over units"),
    "seconds": Metric("seconds per epoch", digits=1),
}
FROM_ZERO = ("train_error", "test_error")
"""Metrics whose axis starts at 0."""


def metric_of(name: str) -> Metric:
    return METRICS.get(name, Metric(name.replace("_", " ")))


def parameterization(config: Config) -> str:
    return str(config.get("parameterization", "unknown"))


@dataclass(frozen=True)
class Experiment:
    """How the runs of an experiment are grouped, compared and shown.

    A column of a table is named by its metric, for the final value, or by ``metric:part`` for the
    mean over a part of training.
    """

    title: str
    intro: str
    rate_metric: str
    """Learning rates are compared by its mean at the end."""
    judged: str
    """Column that the verdict compares with the standard parameterization."""
    results: Mapping[str, Mapping[str, str]]
    """Title → head → column of each table of results; all but the first are folded."""
    curves: tuple[str, ...]
    more_curves: tuple[str, ...]
    """Metrics drawn over training, and those whose figures are folded. If the lowest value is the
    best, epochs to a common value of the first are counted."""
    highest: bool = False
    """Whether the highest metrics are the best; else the lowest."""
    paper_figure: tuple[str, str] = ("", "")
    """Metric and number of the figure of the paper."""

    method: Callable[[Config], str] = parameterization
    method_fields: tuple[str, ...] = ("parameterization",)
    free_fields: tuple[str, ...] = ()
    """Further fields whose default depends on the method."""
    styles: Mapping[str, Style] = field(default_factory=lambda: STYLES)
    baselines: Mapping[str, str] = field(default_factory=dict)
    """Method → what it is compared with; by default the standard parameterization."""
    not_drawn: Mapping[str, str] = field(default_factory=dict)
    """Metric → part of the names of methods that its figure leaves out."""
    by: str = ""
    """Field, such as the data set, that separates settings."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of the values of `by`."""
    units: tuple[str, ...] = ("epoch",)
    """Units of training on the x axis: ``epoch``, ``step``, ``minute``; one panel for each."""

    paper: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Data set or game → method → the paper's result."""
    paper_head: str = "paper"
    published: Mapping[str, Mapping[str, tuple[str, str]]] = field(default_factory=dict)
    """Data set or game → row of the table of results → head and published value."""
    paper_rates: Mapping[str, float] = field(default_factory=dict)
    paper_size: Mapping[str, str] = field(default_factory=dict)
    reference: tuple[str, str] = ("", "")
    """Name and metric of what every method is compared with, such as random play."""
    notes: tuple[str, ...] = ("Mean ± standard deviation over n finished runs.",)
    """Below the first table of results; config fields in braces are filled in."""
    pictures: Callable[[pd.DataFrame, str], Iterator[Picture]] | None = None

    def baseline(self, method: str) -> str:
        return self.baselines.get(method, "standard" if method != "standard" else "")


CLASSIFY = Experiment(
    "Classification with five parameterizations",
    "ConvPool-CNN-C trained in five parameterizations (section 5.1 of the paper), each at the "
    "learning rate with the lowest mean training error at the end.",
    rate_metric="train_error",
    judged="test_error:last epoch",
    results={"Errors": {"training error, %": "train_error", "test error, %": "test_error"}},
    curves=("train_error", "test_error"),
    more_curves=("v_norm", "effective_step"),
    paper_figure=("train_error", "1"),
    paper={
        "cifar10": {
            "standard": "8.43",
            "batch-norm": "8.05",
            "weight-norm": "8.46",
            "mean-only-batch-norm": "8.52",
            "weight-norm-mean-only": "7.31",
        }
    },
    paper_head="paper, test, %",
    published={
        "cifar10": {
            "Maxout (published)": ("paper, test, %", "11.68"),
            "Network in Network (published)": ("paper, test, %", "10.41"),
            "Deeply Supervised (published)": ("paper, test, %", "9.6"),
            "ConvPool-CNN-C (published)": ("paper, test, %", "9.31"),
            "ALL-CNN-C (published)": ("paper, test, %", "9.08"),
        }
    },
    paper_rates={"standard": 0.0003} | dict.fromkeys([*STYLES][1:], 0.003),
    paper_size={"width": "1", "epochs": "200", "limit": "none"},
)

VAE = Experiment(
    "Convolutional VAE with inverse autoregressive flow",
    "Standard parameterization and weight normalization from the same initialization (section 5.2 "
    "of the paper), compared by the bound on log p(x) over the test set, with averaged parameters.",
    rate_metric="train_negative_elbo",
    judged="test_negative_elbo:last epoch",
    results={
        "Bounds": {
            "bound, nats": "test_negative_elbo",
            "bits/dim": "test_bits_per_dim",
            "log p(x), nats": "importance_negative_log_likelihood",
            "its bound, nats": "importance_negative_elbo",
            "training bound, nats": "train_negative_elbo",
        },
        "KL of each stochastic layer": {f"layer {i}": f"test_kl_{i}" for i in range(1, 21)},
    },
    curves=("test_negative_elbo", "test_bits_per_dim"),
    more_curves=("train_negative_elbo",),
    paper_figure=("test_negative_elbo", "2"),
    by="data",
    names={"mnist": "MNIST", "cifar10": "CIFAR-10", "digits": "Digits"},
    published={
        "cifar10": {
            "the authors' larger runs, in Theano (published)": ("bits/dim", "3.28"),
            "the authors' larger runs, in TensorFlow (published)": ("bits/dim", "3.15"),
        },
    },
    paper_size={"width": "1", "depth": "2", "latents": "32", "limit": "none"},
    notes=(
        "Mean ± standard deviation over n finished runs: the paper found a better bound and less "
        "variance between seeds with weight normalization.",
        "log p(x) is estimated with {importance_samples} importance samples on the first "
        "{importance_examples} test examples, and its bound is from the same draws.",
    ),
    pictures=pictures.vae_pictures,
)

G_STYLES = {
    "standard": STYLES["standard"],
    "weight-norm": STYLES["weight-norm"]._replace(name="weight norm, g = ‖v‖"),
    "weight-norm g=one-except-windows": Style(
        "weight norm, g = 1 except windows", STYLES["weight-norm-mean-only"].color, "v"
    ),
    "weight-norm g=one": Style("weight norm, g = 1", STYLES["batch-norm"].color, "s"),
}
"""Weight norm has one curve for each initial g."""


def with_initial_g(config: Config) -> str:
    """Return the parameterization, with the initial g of weight norm unless it is ‖v‖.

    >>> with_initial_g({"parameterization": "weight-norm", "initial_g": "one"})
    'weight-norm g=one'
    """
    name, g = parameterization(config), config.get("initial_g", "norm")
    return name if g == "norm" or name != "weight-norm" else f"{name} g={g}"


DRAW = Experiment(
    "Generative modelling: DRAW",
    "DRAW on binarized MNIST, standard and with every weight vector normalized (section 5.3 of the "
    "paper). The bound is the ELBO, a lower bound on the log-likelihood, in nats: higher is "
    "better. g is the initial length of the weight vectors.",
    rate_metric="train_negative_elbo",
    judged="test_negative_elbo:last epoch",
    results={
        "Bounds": {
            "test bound": "test_negative_elbo",
            "training bound": "train_negative_elbo",
            "KL, test": "test_kl",
        }
    },
    curves=("test_negative_elbo", "train_negative_elbo"),
    more_curves=("w_norm", "v_norm"),
    paper_figure=("test_negative_elbo", "3"),
    method=with_initial_g,
    method_fields=("parameterization", "initial_g"),
    styles=G_STYLES,
    paper_size={"steps": "64", "hidden": "256", "epochs": "100", "limit": "none"},
    notes=("Nats; mean ± standard deviation over n finished runs, at the last epoch.",),
    pictures=pictures.draw_pictures,
)

GAMES = ("breakout", "enduro", "seaquest", "space-invaders")
BEST = "paper, best"
DQN = Experiment(
    "Reinforcement learning: DQN",
    "Deep Q-networks on Atari games (section 5.4 of the paper). A score is the mean return of the "
    "games of a test phase, with unclipped rewards. The paper's result is the best score over the "
    "epochs, which also decides which learning rate is best here; the verdict is on the score in "
    "training, a mean over more games.",
    highest=True,
    rate_metric="best_score",
    judged="train_score:last quarter",
    results={
        "Scores over training": {
            "training, first quarter": "train_score:first quarter",
            "training, last quarter": "train_score:last quarter",
            "best epoch": "best_score",
            "testing, last five": "score:last five",
        }
    },
    curves=("train_score", "score"),
    more_curves=("mean_q", "loss"),
    paper_figure=("score", "4"),
    by="game",
    names={game: game.replace("-", " ").title() for game in GAMES},
    paper={
        "breakout": {"standard": "410", "weight-norm": "403"},
        "enduro": {"standard": "1,250", "weight-norm": "1,448"},
        "seaquest": {"standard": "7,188", "weight-norm": "7,375"},
        "space-invaders": {"standard": "1,779", "weight-norm": "2,179"},
    },
    paper_head=BEST,
    published={
        "breakout": {"Mnih et al. (published)": (BEST, "401")},
        "enduro": {"Mnih et al. (published)": (BEST, "302")},
        "seaquest": {"Mnih et al. (published)": (BEST, "5,286")},
        "space-invaders": {"Mnih et al. (published)": (BEST, "1,975")},
    },
    paper_rates={"standard": 0.0001, "weight-norm": 0.0003},
    paper_size={
        "epochs": "200",
        "train_steps": "250000",
        "replay_size": "1000000",
        "epsilon_steps": "1000000",
        "width": "1",
    },
    reference=("random play", "random_score"),
    notes=(
        "Mean score of the games in training, of the best test phase, and of the last five; mean "
        "± standard deviation over n finished runs.",
    ),
    pictures=pictures.game_pictures,
)

BLUE, GREEN, PURPLE = (
    STYLES[kind].color for kind in ("weight-norm", "weight-norm-mean-only", "mean-only-batch-norm")
)
RESTORED = " restored"
OPTIMIZERS = {
    "adamw standard": Style("AdamW", STYLES["standard"].color, "o"),
    "adamw weight-norm": Style("AdamW, weight norm", BLUE, "^"),
    "muon standard": Style("Muon", STYLES["batch-norm"].color, "s"),
    "muon weight-norm": Style("Muon, weight norm", GREEN, "v"),
    "muown weight-norm": Style("Muown, as published", "#b2182b", "P"),
    "hyperball weight-norm": Style("Adam, fixed norm (Hyperball)", PURPLE, "D"),
    f"adamw weight-norm{RESTORED}": Style("AdamW, weight norm, ‖v‖ restored", "#a6611a", "x"),
    f"muon weight-norm{RESTORED}": Style("Muon, weight norm, ‖v‖ restored", "#7f7f7f", "x"),
}


def with_optimizer(config: Config) -> str:
    """Return optimizer and parameterization, with a mark if ‖v‖ is restored after every step."""
    name = f"{config.get('optimizer', 'unknown')} {parameterization(config)}"
    return name + RESTORED * bool(config.get("retract"))


LANGUAGE = Experiment(
    "Language model (beyond the paper)",
    "A byte-level transformer on the Python source of torch, with weight norm in the optimizer of "
    "its blocks' matrices. Each method at the learning rate with the lowest mean training loss at "
    "the end. Lower is better.",
    rate_metric="train_bits_per_byte",
    judged="test_bits_per_byte:last epoch",
    results={
        "Bits per byte": {
            "training": "train_bits_per_byte",
            "held-out": "test_bits_per_byte",
            "seconds per epoch": "seconds:shortest",
        }
    },
    curves=("test_bits_per_byte",),
    more_curves=("train_bits_per_byte", "v_norm", "step_angle"),
    method=with_optimizer,
    method_fields=("parameterization", "optimizer", "retract"),
    free_fields=("length_learning_rate", "weight_decay"),
    styles=OPTIMIZERS,
    baselines={name: "adamw standard" for name in OPTIMIZERS if not name.startswith("muon")}
    | {name: "muon standard" for name in OPTIMIZERS if name.startswith("muon")}
    | {"adamw standard": "", "muon standard": ""},
    # ‖v‖ of Hyperball is one number per matrix, and retraction is about lengths and angles.
    not_drawn={
        "v_norm": "hyperball",
        "train_bits_per_byte": RESTORED,
        "test_bits_per_byte": RESTORED,
    },
    units=("step", "minute"),
    reference=("trigram model", "trigram_bits_per_byte"),
    notes=(
        "Bits per byte after the last epoch: mean ± standard deviation over n finished runs.",
        "Seconds of the shortest epoch, without its evaluation: the others share the machine with "
        "other work.",
    ),
)

EXPERIMENTS = {
    "classify": CLASSIFY,
    "vae": VAE,
    "draw": DRAW,
    "dqn": DQN,
    "language": LANGUAGE,
}
