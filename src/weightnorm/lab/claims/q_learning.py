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
    Outcome,
    Statement,
    Verdict,
    above,
    below,
    claim,
    figure,
    interval,
    paired,
    series,
    weakest,
)
from weightnorm.lab.records import Row
from weightnorm.lab.replay_buffer import ReplayBuffer, Transitions
from weightnorm.lab.statistics import Interval

GAME = "space-invaders"
BATCH, LARGE = 64, 256
"""The paper's batch, and one that makes an update four times as long."""
RATES = (0.0001, 0.0003)
"""The paper's learning rates of standard and weight norm; each is evaluated at the one that leaves
less of the targets unexplained with the first seed, on the others."""
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
        "the others, and more of the targets' variance is left unexplained; each at "
        "the better of two rates by the first seed, on the other seeds. Not shown unless the "
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
    parts = [(*x, rate, seed) for x in settings for rate in RATES for seed in context.seeds]
    found = dict(zip(parts, context.map(q_learning, parts), strict=True))
    first, *others = context.seeds
    arms: dict[str, Arms] = {"changed": {}, "unexplained": {}}
    for how, batch in settings:
        rate = min(RATES, key=lambda rate: found[how, batch, rate, first]["unexplained"])
        for key, arm in arms.items():
            name = f"{how}, batch {batch}"
            arm[name] = [found[how, batch, rate, seed][key] for seed in others]
    texts = [
        f"{key}: " + ", ".join(f"{name} {interval(x)}" for name, x in arm.items())
        for key, arm in arms.items()
    ]
    more = [beyond_the_others(arm) for arm in arms.values()]
    less = [beyond_large_batches(arm) for arm in arms.values()]
    value = f"{'; '.join(texts)}. Batch norm above the worse of the others: {more[0]}, {more[1]}"
    worse, improved = stability_verdicts(arms["changed"], arms["unexplained"])
    figures = tuple(_figure(found, settings, context.seeds, key) for key in FIGURES)
    return [
        Outcome(value, worse, len(others), arms, figures),
        Outcome(f"changed less by {less[0]}, unexplained less by {less[1]}", improved, len(others)),
    ]


Arms = dict[str, list[float]]
"""By seed: standard, weight norm, batch norm, and batch norm with large batches."""


def beyond_the_others(arms: Arms) -> Interval:
    """Batch norm above the worse of standard and weight norm, seed by seed."""
    standard, weight_norm, batch_norm, _ = arms.values()
    return paired(batch_norm, [*map(max, zip(standard, weight_norm, strict=True))])


def beyond_large_batches(arms: Arms) -> Interval:
    """Batch norm above batch norm with large batches."""
    *_, batch_norm, large = arms.values()
    return paired(batch_norm, large)


def stability_verdicts(changed: Arms, unexplained: Arms) -> tuple[Verdict, Verdict]:
    """Whether batch norm is worse than the worse of the others in both numbers, and better with
    large batches; not shown if the others have learned nothing."""
    standard, weight_norm, *_ = unexplained.values()
    if not all(below(interval(x), LEARNED) == REPRODUCED for x in (standard, weight_norm)):
        return NOT_SHOWN, NOT_SHOWN
    worse, improved = (
        weakest(*(above(beyond(arms), 0.0) for arms in (changed, unexplained)))
        for beyond in (beyond_the_others, beyond_large_batches)
    )
    return worse, improved


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


def _figure(found: dict[Any, Any], settings: list[Any], seeds: tuple[int, ...], key: str) -> Row:
    lines = []
    for how, batch in settings:
        curves = [found[how, batch, RATES[1], seed][key] for seed in seeds]
        x = range(0, EVERY * len(curves[0]), EVERY)
        lines.append(series(f"{how}, batch {batch}", x, zip(*curves, strict=True)))
    title, y = FIGURES[key]
    return figure(title, "update", y, lines, log_y=key == "residuals")
