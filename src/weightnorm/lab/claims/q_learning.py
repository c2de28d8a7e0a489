"""Claim 21: batch norm in deep Q-learning (section 5.4)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from weightnorm import Parameterization
from weightnorm.lab import dqn
from weightnorm.lab.atari import Atari
from weightnorm.lab.claims.claim import (
    NOT_SHOWN,
    REPRODUCED,
    Context,
    Figure,
    Outcome,
    Statement,
    Verdict,
    above,
    below,
    claim,
    paired,
    series,
    weakest,
)
from weightnorm.lab.replay_buffer import ReplayBuffer, Transitions
from weightnorm.lab.statistics import mean_interval

GAME = "space-invaders"
BATCH, LARGE = 64, 256
"""The paper's batch, and one that makes an update four times as long."""
RATES = (0.0001, 0.0003)
"""The paper's learning rates of standard and weight norm; each is evaluated at the one that leaves
less of the targets unexplained."""
STANDARD, WEIGHT_NORM, BATCH_NORM = "standard", "weight-norm", "batch-norm"
LEARNED = 0.9
"""Share of the targets' variance below which something was learned, if it is left unexplained."""
EVERY = 10
"""Updates between evaluations."""
FIGURES = {
    "changes": ("Unseen states whose greedy action changes in one update", "share of states"),
    "residuals": ("Unexplained variance of the targets", "share of the variance"),
}
"""Title and y label of the figures, which show the higher learning rate."""


@claim(
    21,
    "5.4",
    Statement(
        "The noise of batch norm's statistics destabilizes deep Q-learning at normal batch sizes",
        "could not be made to work",
        f"Q-learning from a fixed replay of random play, {GAME}, batches of {BATCH}: with batch "
        "norm more unseen states change their greedy action in one update than with the worse of "
        "the others, and more of the targets' variance is left unexplained. Not shown unless the "
        f"others leave less than {100 * LEARNED:g} % unexplained: where nothing was learned, "
        "nothing can be destabilized",
    ),
    Statement(
        "…and it needs an impractically large batch",
        "an impractically large minibatch",
        f"the same, with batches of {LARGE}: fewer changes and less unexplained than with {BATCH}; "
        "under the same condition",
    ),
)
def batch_norm_in_dqn(context: Context) -> list[Outcome]:
    settings = [(how, BATCH) for how in (STANDARD, WEIGHT_NORM, BATCH_NORM)]
    settings.append((BATCH_NORM, context.size(LARGE, 2 * BATCH)))
    parts = [*((*each, rate, seed) for each in settings for rate in RATES
               for seed in context.seeds)]  # fmt: skip
    found = dict(zip(parts, context.map(q_learning, parts), strict=True))
    rates = {
        (how, batch): better_rate(
            {r: [found[how, batch, r, s]["unexplained"] for s in context.seeds] for r in RATES}
        )
        for how, batch in settings
    }
    numbers = {
        key: {
            f"{how}, batch {batch}": [found[how, batch, rate, s][key] for s in context.seeds]
            for (how, batch), rate in rates.items()
        }
        for key in ("changed", "unexplained")
    }
    texts = [
        f"{key}: " + ", ".join(f"{how} {mean_interval(x)}" for how, x in numbers[key].items())
        for key in numbers
    ]
    figures = tuple(_figure(found, settings, context.seeds, key) for key in FIGURES)
    worse, improved = stability_verdicts(*(tuple(x.values()) for x in numbers.values()))
    n = len(context.seeds)
    more = [paired(x[2], [*map(max, zip(x[0], x[1], strict=True))])
            for x in (tuple(x.values()) for x in numbers.values())]  # fmt: skip
    value = f"{'; '.join(texts)}. Batch norm above the worse of the others: {more[0]}, {more[1]}"
    less = [paired(x[2], x[3]) for x in (tuple(x.values()) for x in numbers.values())]
    return [
        Outcome(value, worse, n, numbers, figures),
        Outcome(f"changed less by {less[0]}, unexplained less by {less[1]}", improved, n),
    ]


Arms = tuple[list[float], ...]
"""By seed: standard, weight norm, batch norm, and batch norm with large batches."""


def stability_verdicts(changed: Arms, unexplained: Arms) -> tuple[Verdict, Verdict]:
    """Whether batch norm is worse than the worse of the others in both numbers, and better with
    large batches; not shown if the others have learned nothing."""
    if not all(below(mean_interval(x), LEARNED) == REPRODUCED for x in unexplained[:2]):
        return NOT_SHOWN, NOT_SHOWN
    arms = (changed, unexplained)
    others = [[*map(max, zip(x[0], x[1], strict=True))] for x in arms]
    worse = [above(paired(x[2], y), 0.0) for x, y in zip(arms, others, strict=True)]
    improved = [above(paired(x[2], x[3]), 0.0) for x in arms]
    return weakest(*worse), weakest(*improved)


def better_rate(results: dict[float, list[float]]) -> float:
    """The learning rate with the lower mean over seeds.

    >>> better_rate({0.1: [2.0, 2.0], 0.3: [1.0, 2.0]})
    0.3
    """
    return min(results, key=lambda rate: fmean(results[rate]))


def q_learning(
    context: Context, how: str, batch: int, rate: float, seed: int
) -> dict[str, float | list[float]]:
    """Learn from a fixed replay buffer; stability over the second half of the updates.

    Evaluated in evaluation mode: batch norm uses its running statistics."""
    transitions, updates, width = context.size((4000, 1500, 0.25), (200, 40, 0.125))
    torch.manual_seed(seed)
    config = replace(
        dqn.PRESETS["cpu"],
        game=GAME,
        parameterization=Parameterization(how),
        learning_rate=rate,
        batch_size=batch,
        width=width,
    )
    with TemporaryDirectory() as folder:
        replay = random_play(Path(folder) / "replay", transitions)
        unseen = random_play(Path(folder) / "unseen", transitions // 2).sample(200)
        agent = dqn.Agent(config, Atari(GAME), torch.device("cpu"))
        agent.initialize(replay.sample(500).states)
        changes, residuals = [], []
        for update in range(updates):
            if update % (updates // 8) == 0:
                agent.update_target()
            before = values(agent, unseen) if update % EVERY == 0 else None
            agent.update(replay.sample(batch))
            if before is not None:
                after = values(agent, unseen)
                changes.append((before.argmax(1) != after.argmax(1)).double().mean().item())
                residuals.append(unexplained(agent, unseen, after))
    half = len(changes) // 2
    return {
        "changed": fmean(changes[half:]),
        "unexplained": fmean(residuals[half:]),
        "changes": changes,
        "residuals": residuals,
    }


def random_play(path: Path, steps: int) -> ReplayBuffer:
    """Fill a replay buffer with transitions of random actions."""
    game = Atari(GAME)
    replay = ReplayBuffer(path, steps, game.shape, margin=0)
    replay.start(game.reset())
    for action in torch.randint(game.actions, (steps,)).tolist():
        step = game.step(action)
        reward, terminal = min(max(step.reward, -1), 1), step.over or step.life_lost
        replay.append(action, reward, terminal, game.reset() if step.over else step.frame)
    return replay


@torch.no_grad()
def values(agent: dqn.Agent, unseen: Transitions) -> Tensor:
    """Q of every action in evaluation mode."""
    q: Tensor = agent.actor(unseen.states)
    return q


@torch.no_grad()
def unexplained(agent: dqn.Agent, unseen: Transitions, q: Tensor) -> float:
    """Mean (Q − target)² over the variance of the targets."""
    next_q = agent.target(unseen.next_states)
    targets = dqn.td_targets(unseen.rewards, unseen.terminal, next_q, agent.config.discount)
    error = q.gather(1, unseen.actions[:, None]).squeeze(1) - targets
    return (error.square().mean() / targets.var(correction=0)).item()


def _figure(found: dict[Any, Any], settings: list[Any], seeds: tuple[int, ...], key: str) -> Figure:
    lines = []
    for how, batch in settings:
        curves = [found[how, batch, RATES[1], seed][key] for seed in seeds]
        x = range(0, EVERY * len(curves[0]), EVERY)
        lines.append(series(f"{how}, batch {batch}", x, zip(*curves, strict=True)))
    title, y = FIGURES[key]
    return Figure(title, "update", y, tuple(lines), log_y=key == "residuals")
