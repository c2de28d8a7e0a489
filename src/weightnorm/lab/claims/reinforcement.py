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
    FAILS,
    HOLDS,
    NOT_SHOWN,
    QUALITATIVELY,
    Figure,
    Measured,
    Verdict,
    claim,
    series,
)
from weightnorm.lab.claims.context import Context
from weightnorm.lab.replay_buffer import ReplayBuffer, Transitions
from weightnorm.lab.statistics import Interval, mean_interval

GAME = "space-invaders"
BATCH, LARGE = 64, 256
"""The paper's batch, and one that makes an update four times as long."""
RATES = (0.0001, 0.0003)
"""The paper's learning rates of standard and weight norm; each is evaluated at the one that leaves
less of the targets unexplained."""
EVERY = 10
"""Updates between evaluations."""
FIGURES = {
    "changes": ("Unseen states whose greedy action changes in one update", "share of states"),
    "residuals": ("Unexplained variance of the targets", "share of the variance"),
}
"""Title and y label of the figures, which show the higher learning rate."""


@claim(
    21, "5.4", "The noise of batch norm's statistics destabilizes deep Q-learning at normal batch "
    "sizes; it needs an impractically large batch",
    paper="could not be made to work",
    measured=f"Q-learning from a fixed replay of random play, {GAME}: share of unseen states whose "
    "greedy action changes in one update, and the part of the targets' variance left unexplained",
)  # fmt: skip
def batch_norm_in_dqn(context: Context) -> Measured:
    settings = [(how, BATCH) for how in map(str, dqn.Config.COMPARED)]
    settings.append((str(Parameterization.BATCH_NORM), 2 * BATCH if context.quick else LARGE))
    parts = [
        (*setting, rate, seed) for setting in settings for rate in RATES for seed in context.seeds
    ]
    found = dict(zip(parts, context.map(q_learning, parts), strict=True))
    numbers: dict[str, Any] = {}
    more: dict[str, Interval] = {}
    rates = {
        (how, batch): better_rate(
            {r: [found[how, batch, r, s]["unexplained"] for s in context.seeds] for r in RATES}
        )
        for how, batch in settings
    }
    for key in ("changed", "unexplained"):
        numbers[key] = {
            f"{how}, batch {batch}": [found[how, batch, rate, seed][key] for seed in context.seeds]
            for (how, batch), rate in rates.items()
        }
        standard, weight_norm, batch_norm, large = numbers[key].values()
        worse = [max(pair) for pair in zip(standard, weight_norm, strict=True)]
        more[key] = difference(batch_norm, worse)
        more[f"{key}, than with large batches"] = difference(batch_norm, large)
    texts = [
        f"{key}: " + ", ".join(f"{how} {mean_interval(x)}" for how, x in numbers[key].items())
        for key in numbers
    ]
    value = (
        f"{'; '.join(texts)}. Batch norm above the worse of the others: {more['changed']} and "
        f"{more['unexplained']}"
    )
    figures = tuple(
        _figure(found, settings, context.seeds, key) for key in ("changes", "residuals")
    )
    improved = more["changed, than with large batches"]
    verdict = stability_verdict(more["changed"], more["unexplained"], improved)
    return Measured(value, verdict, len(context.seeds), {**numbers, "more": more}, figures)


def stability_verdict(changed: Interval, unexplained: Interval, improved: Interval) -> Verdict:
    """Holds if batch norm's greedy actions change more often and its values leave more unexplained
    than the worse of the other two, and large batches improve on the former; qualitatively if one
    of the first two holds and the other is not opposite; does not hold if one is opposite and the
    other is not shown."""
    worse = [changed.low > 0, unexplained.low > 0]
    if all(worse) and improved.low > 0:
        return HOLDS
    if changed.high < 0 or unexplained.high < 0:
        return NOT_SHOWN if any(worse) else FAILS
    return QUALITATIVELY if any(worse) else NOT_SHOWN


def better_rate(results: dict[float, list[float]]) -> float:
    """The learning rate with the lower mean over seeds.

    >>> better_rate({0.1: [2.0, 2.0], 0.3: [1.0, 2.0]})
    0.3
    """
    return min(results, key=lambda rate: fmean(results[rate]))


def difference(a: list[float], b: list[float]) -> Interval:
    """Interval of the difference, paired by seed."""
    return mean_interval([x - y for x, y in zip(a, b, strict=True)])


def q_learning(
    context: Context, how: str, batch: int, rate: float, seed: int
) -> dict[str, float | list[float]]:
    """Learn from a fixed replay buffer; stability over the second half of the updates.

    Evaluated in evaluation mode: batch norm uses its running statistics."""
    transitions, updates, width = (200, 40, 0.125) if context.quick else (4000, 300, 0.25)
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
