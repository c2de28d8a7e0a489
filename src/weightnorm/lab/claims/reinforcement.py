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
from weightnorm.lab.claims.claim import (
    FAILS,
    HOLDS,
    QUALITATIVELY,
    Figure,
    Interval,
    Measured,
    Verdict,
    bootstrap,
    claim,
    series,
)
from weightnorm.lab.claims.context import Workbench
from weightnorm.lab.experiments import dqn
from weightnorm.lab.rl.atari import Atari
from weightnorm.lab.rl.replay_buffer import Batch, ReplayBuffer

GAME = "space-invaders"
BATCH, LARGE = 64, 256
"""The paper's batch, and one that makes an update four times as long."""
RATES = (0.0001, 0.0003)
"""The paper's choices for standard and weight norm; each way counts at its better one."""
EVERY = 10
"""Updates from one look to the next."""
FIGURES = {
    "changes": ("Unseen states whose greedy action changes in one update", "share of states"),
    "residuals": ("What the values leave unexplained of their targets", "part of the variance"),
}
"""Title, and what stands at the axis; at the higher rate."""


@claim(
    21, "5.4", "The noise of batch norm's statistics destabilizes deep Q-learning at normal batch "
    "sizes; it needs an impractically large batch",
    paper="could not be made to work",
    measured=f"Q-learning from a fixed replay of random play, {GAME}: share of unseen states whose "
    "greedy action changes in one update, and the part of the targets' variance left unexplained",
)  # fmt: skip
def batch_norm_in_dqn(bench: Workbench) -> Measured:
    ways = [(way, BATCH) for way in map(str, dqn.COMPARED)]
    ways.append((str(Parameterization.BATCH_NORM), 2 * BATCH if bench.quick else LARGE))
    parts = [(*way, rate, seed) for way in ways for rate in RATES for seed in bench.seeds]
    found = dict(zip(parts, bench.each(learned, parts), strict=True))
    numbers: dict[str, Any] = {}
    more: dict[str, Interval] = {}
    for key in ("changed", "unexplained"):
        numbers[key] = {
            f"{how}, batch {batch}": better(
                [[found[how, batch, rate, seed][key] for seed in bench.seeds] for rate in RATES]
            )
            for how, batch in ways
        }
        standard, weight_norm, batch_norm, large = numbers[key].values()
        worse = [max(pair) for pair in zip(standard, weight_norm, strict=True)]
        more[key] = difference(batch_norm, worse)
        more[f"{key}, than with large batches"] = difference(batch_norm, large)
    said = [
        f"{key}: " + ", ".join(f"{way} {bootstrap(x)}" for way, x in numbers[key].items())
        for key in numbers
    ]
    value = (
        f"{'; '.join(said)}. Batch norm above the worse of the others: {more['changed']} and "
        f"{more['unexplained']}"
    )
    figures = tuple(_figure(found, ways, bench.seeds, key) for key in ("changes", "residuals"))
    mended = more["changed, than with large batches"]
    verdict = stability_verdict(more["changed"], more["unexplained"], mended)
    return Measured(value, verdict, len(bench.seeds), {**numbers, "more": more}, figures)


def stability_verdict(changed: Interval, unexplained: Interval, mended: Interval) -> Verdict:
    """Batch norm's agent wavers more and leaves more unexplained than the worse of the other two,
    and wavers more than with large batches; or one of the first two; or none."""
    worse = [changed.low > 0, unexplained.low > 0]
    if all(worse) and mended.low > 0:
        return HOLDS
    return QUALITATIVELY if any(worse) else FAILS


def better(by_rate: list[list[float]]) -> list[float]:
    """The seeds at the rate with the lower mean."""
    return min(by_rate, key=fmean)


def difference(a: list[float], b: list[float]) -> Interval:
    """Seed by seed."""
    return bootstrap([x - y for x, y in zip(a, b, strict=True)])


def learned(
    bench: Workbench, way: str, batch: int, rate: float, seed: int
) -> dict[str, float | list[float]]:
    """An agent that learns from the replay: how stable it is in the second half of the updates.

    All is measured as the agent acts, with the statistics that batch norm keeps."""
    plays, updates, width = (200, 40, 0.125) if bench.quick else (4000, 300, 0.25)
    torch.manual_seed(seed)
    config = replace(
        dqn.PRESETS["cpu"],
        game=GAME,
        parameterization=Parameterization(way),
        learning_rate=rate,
        batch_size=batch,
        width=width,
    )
    with TemporaryDirectory() as folder:
        replay = random_play(Path(folder) / "replay", plays)
        unseen = random_play(Path(folder) / "unseen", plays // 2).sample(200)
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
    """So many transitions of a player who presses buttons at random."""
    game = Atari(GAME)
    replay = ReplayBuffer(path, steps, game.shape, margin=0)
    replay.append_frame(game.reset())
    for action in torch.randint(game.actions, (steps,)).tolist():
        step = game.step(action)
        replay.append_transition(action, min(max(step.reward, -1), 1), step.over or step.life_lost)
        replay.append_frame(game.reset() if step.over else step.frame)
    return replay


@torch.no_grad()
def values(agent: dqn.Agent, unseen: Batch) -> Tensor:
    """Q of every action, as the agent sees it when it acts."""
    q: Tensor = agent.actor(unseen.states)
    return q


@torch.no_grad()
def unexplained(agent: dqn.Agent, unseen: Batch, q: Tensor) -> float:
    """Mean (Q − target)² over the variance of the targets."""
    next_q = agent.target(unseen.next_states)
    targets = dqn.td_targets(unseen.rewards, unseen.terminal, next_q, agent.config.discount)
    off = q.gather(1, unseen.actions[:, None]).squeeze(1) - targets
    return (off.square().mean() / targets.var(correction=0)).item()


def _figure(found: dict[Any, Any], ways: list[Any], seeds: tuple[int, ...], key: str) -> Figure:
    lines = []
    for how, batch in ways:
        curves = [found[how, batch, RATES[1], seed][key] for seed in seeds]
        x = range(0, EVERY * len(curves[0]), EVERY)
        lines.append(series(f"{how}, batch {batch}", x, zip(*curves, strict=True)))
    title, y = FIGURES[key]
    return Figure(title, "update", y, tuple(lines), log_y=key == "residuals")
