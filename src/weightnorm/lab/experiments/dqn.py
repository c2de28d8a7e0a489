"""Experiment 4: deep Q-networks on Atari games (section 5.4).

The agent of Mnih et al. (2015) with Adamax at β1 = 0.5 and batches of 64, standard and with weight
normalization; batch normalization, which the paper could not make work, is there to be seen. An
epoch is so many steps of learning, then so many of testing. See docs/experiments/dqn.md for the
deviations from the paper and what came out.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from weightnorm import Parameterization, data_dependent_init, parameterize, remove_weight_norm
from weightnorm.lab.errors import require
from weightnorm.lab.models.q_network import QNetwork
from weightnorm.lab.rl.atari import Atari, Game, cartridges
from weightnorm.lab.rl.episodes import Beginning, Player, Tester, choose
from weightnorm.lab.rl.replay_buffer import Batch, Replay
from weightnorm.lab.runs.config import RunConfig
from weightnorm.lab.runs.records import RunRecord, load_record
from weightnorm.lab.runs.run import Run

NAME = "dqn"
TITLE = "deep Q-networks on Atari games (section 5.4)"
METRIC = "best_score"
"""Decides which learning rate is best, as in the paper's figure 4."""
HIGHER_IS_BETTER = ("best_score", "score")
AXES = {"games": "game"}
"""What a sweep may range over besides the usual: its flag → the field."""
PAPERS_GAMES = ("breakout", "enduro", "seaquest", "space-invaders")
COMPARED = (
    Parameterization.STANDARD,
    Parameterization.WEIGHT_NORM,
    Parameterization.BATCH_NORM,
)
SHOWN = 150
"""Steps of play that a run keeps as pictures."""


@dataclass(frozen=True)
class Config(RunConfig):
    """A deep Q-network that learns to play an Atari game."""

    learning_rate: float = 0.0003
    """Adamax's step size; on the command line, by default what the paper found to work well."""
    game: str = "space-invaders"
    """Any of ale-py's; the paper's are breakout, enduro, seaquest and space-invaders."""
    epochs: int = 200
    """Rounds of learning and testing."""
    train_steps: int = 250_000
    """Steps of the agent in an epoch's learning; each is four frames of the game."""
    test_steps: int = 125_000
    """And in its testing."""
    width: float = 1.0
    """Factor on the network's 32, 64 and 64 channels and its 512 units."""
    batch_size: int = 64
    """Transitions in an update."""
    replay_size: int = 1_000_000
    """Transitions that are drawn from: the newest ones."""
    replay_start: int = 50_000
    """Steps of random play before the first update."""
    update_every: int = 4
    """Steps between updates."""
    sync_every: int = 10_000
    """Steps between copies of the network to the target network."""
    discount: float = 0.99
    """What a reward is worth one step later."""
    epsilon_steps: int = 1_000_000
    """Steps in which the chance of a random action falls from 1 to its end."""
    epsilon_end: float = 0.1
    """Where it ends."""
    test_epsilon: float = 0.05
    """The chance of a random action in testing."""
    init_states: int = 500
    """States for the data-dependent initialization, valued again after each epoch."""
    value_std: float = 1.0
    """Spread of the first values over those states."""

    PLACE: ClassVar[tuple[str, ...]] = ("game", "parameterization")

    def __post_init__(self) -> None:
        super().__post_init__()
        how, compared = self.parameterization, ", ".join(map(str, COMPARED))
        require(how in COMPARED, "parameterization", how, f"one of {compared}")
        for field in ("epochs", "test_steps", "replay_start", "update_every", "sync_every"):
            require(getattr(self, field) >= 1, field, getattr(self, field), "1 or more")
        for field in ("batch_size", "init_states"):
            require(getattr(self, field) >= 2, field, getattr(self, field), "2 or more")
        for field in ("discount", "epsilon_end", "test_epsilon"):
            require(0 <= getattr(self, field) <= 1, field, getattr(self, field), "from 0 to 1")
        for field in ("width", "value_std"):
            require(getattr(self, field) > 0, field, getattr(self, field), "a positive number")
        require(self.epsilon_steps >= 1, "epsilon_steps", self.epsilon_steps, "1 or more")
        start, size = self.replay_start, self.replay_size
        require(start + self.update_every <= self.train_steps, "replay_start", start,
                "less than train-steps by an update or more")  # fmt: skip
        require(size >= start, "replay_size", size, "replay-start or more")
        if self.game not in PAPERS_GAMES:
            known = list(cartridges())
            near = get_close_matches(self.game, known, 3, cutoff=0.5) or known
            require(self.game in known, "game", self.game, f"one of ale-py's: {', '.join(near)}?")


PAPER = Config(preset="paper")
CPU = replace(
    PAPER,
    preset="cpu",
    epochs=20,
    train_steps=25_000,
    test_steps=10_000,
    width=0.5,
    batch_size=32,
    replay_size=200_000,
    replay_start=10_000,
    sync_every=2_000,
    epsilon_steps=100_000,
    value_std=0.01,
)
PRESETS = {
    "paper": PAPER,
    "cpu": CPU,
    "demo": replace(
        CPU,
        preset="demo",
        epochs=3,
        train_steps=1_000,
        test_steps=500,
        replay_size=5_000,
        replay_start=400,
        sync_every=200,
        epsilon_steps=1_500,
        init_states=100,
    ),
}
SIZES = {
    "paper": ("50 million steps", "replay of 1 million, 7.4 GB", "a GPU, a week"),
    "cpu": ("500 thousand steps", "half the width, batches of 32", "two cores, an hour"),
    "demo": ("3 thousand steps", "half the width", "a minute, too short to learn"),
}
PAPERS_CHOICE = dict.fromkeys(COMPARED, 0.0003) | {Parameterization.STANDARD: 0.0001}
"""From its grid {0.0001, 0.0003, 0.001, 0.003}; it names none for batch norm."""
NEXT = dict.fromkeys(COMPARED, 0.001) | {Parameterization.STANDARD: 0.0003}
"""The next ones of that grid, for a hundredth of the steps."""
LEARNING_RATES = {"paper": PAPERS_CHOICE, "cpu": NEXT, "demo": NEXT}


def run(
    config: Config, console: Console | None = None, game: Callable[[str], Game] = Atari
) -> RunRecord:
    """Train one agent and test it as it learns; the record is the result."""
    with Run(NAME, config, PRESETS, console) as run:
        if (record := run.finished) is not None:
            return record
        ranks = run.ranks.world
        require(ranks == 1, "ranks", ranks, "1: an agent plays alone; a sweep runs several")
        player, tester = Player(game(config.game)), Tester(game(config.game))
        shape, pin, beginning = player.game.shape, run.device.type == "cuda", Beginning()
        replay = Replay(run.folder / "replay.bin", config.replay_size, shape, pin=pin)
        agent = Agent(config, player.game, run.device)
        states = {"model": agent.model, "target": agent.target, "optimizer": agent.optimizer}
        states |= {"replay": replay, "player": player, "tester": tester, "beginning": beginning}
        if run.restore(**states):
            agent.refresh()
        else:
            replay.see(player.start())

        for _ in run.epochs(config.epochs):
            for step in run.steps(config.train_steps + config.test_steps, replay.margin // 2):
                if step < config.train_steps:
                    loss = train_step(agent, player, replay, beginning)
                    if loss is not None:
                        run.add(loss=loss, count=config.batch_size)
                    continue
                if step == config.train_steps:
                    tester.begin()
                tester.play(agent.actor, config.test_epsilon)
            run.log(
                score=tester.score,
                games=tester.games,
                train_score=player.score,
                mean_q=agent.values(beginning.states).mean().item(),
                loss=run.total("loss") / run.total("count"),
                epsilon=epsilon(config, replay.steps),
            )
            player.count_anew()

        run.keep("game", frames=watch(agent.actor, tester, config.test_epsilon))
        best = max(row["score"] for row in load_record(run.folder).metrics)
        last = {name: run.last[name] for name in ("score", "mean_q")}
        record = run.finish({"best_score": best, **last, "random_score": beginning.score})
        replay.discard()
        return record


class Agent:
    """The network that learns, and two plain copies of it: one acts, one says what to aim at.

    Note [plain copies]
        Neither copy is trained, so neither has v and g: choosing an action costs the same with
        weight norm as without, and so does the target's pass over a batch.
    """

    def __init__(self, config: Config, game: Game, device: torch.device) -> None:
        self.config, self.device = config, device
        wrap = partial(parameterize, how=config.parameterization)
        self.model = QNetwork(wrap, game.actions, shape=game.shape, width=config.width).to(device)
        self.actor, self.target = plain_copy(self.model), plain_copy(self.model)
        self.optimizer = torch.optim.Adamax(
            self.model.parameters(), lr=config.learning_rate, betas=(0.5, 0.999)
        )
        self.networks: tuple[Any, Any] = self.model, self.target
        if config.compile:
            self.networks = torch.compile(self.model), torch.compile(self.target)

    def begin(self, states: Tensor) -> None:
        """Initialize on data; the copies follow."""
        std, last = self.config.value_std, cast(Any, self.model[-1])
        normed = isinstance(last, nn.Sequential)  # a layer and batch norm, which sets the scale
        spread = {} if normed else {str(len(self.model) - 1): std}
        data_dependent_init(self.model, states.to(self.device), target_std=spread)
        if normed:
            nn.init.constant_(last[-1].weight, std)
        self.refresh()
        self.sync()

    def refresh(self) -> None:
        """The actor follows."""
        copy_plain(self.model, self.actor)

    def sync(self) -> None:
        """The target follows."""
        copy_plain(self.model, self.target)

    def values(self, states: Tensor) -> Tensor:
        """max Q(s, ·) of each state."""
        values: Tensor = self.actor(states.to(self.device)).amax(1)
        return values

    def learn(self, batch: Batch) -> Tensor:
        """One update; the loss, summed over the batch."""
        batch, (model, target) = batch.to(self.device), self.networks
        with torch.no_grad():
            next_q = target(batch.next_states)
        aims = td_targets(batch.rewards, batch.terminal, next_q, self.config.discount)
        q = model(batch.states).gather(1, batch.actions[:, None]).squeeze(1)
        loss = F.huber_loss(q, aims, reduction="sum")  # its gradient is the error, clipped at 1
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.refresh()
        return loss.detach()


def train_step(agent: Agent, player: Player, replay: Replay, beginning: Beginning) -> Tensor | None:
    """Act, remember what came of it, and learn if it is time to; the loss if so."""
    config, loss = agent.config, None
    chance = epsilon(config, replay.steps)
    action = choose(agent.actor, replay.state, chance, player.game.actions)
    step = player.step(action)
    replay.record(action, min(max(step.reward, -1), 1), step.over or step.life_lost)
    replay.see(step.frame)
    if replay.steps < config.replay_start:
        return None
    if replay.steps == config.replay_start:
        beginning.states = replay.draw(config.init_states).states.clone()
        beginning.score = player.score
        player.count_anew()
        agent.begin(beginning.states)
    elif replay.steps % config.update_every == 0:
        loss = agent.learn(replay.draw(config.batch_size))
    if replay.steps % config.sync_every == 0:
        agent.sync()
    return loss


def td_targets(rewards: Tensor, terminal: Tensor, next_q: Tensor, discount: float) -> Tensor:
    """r + γ·max Q(s′, ·), and r alone where the life ended.

    >>> td_targets(torch.ones(2), torch.tensor([0.0, 1.0]), torch.tensor([[1.0, 3.0]] * 2), 0.5)
    tensor([2.5000, 1.0000])
    """
    return rewards + discount * (1 - terminal) * next_q.amax(1)


def epsilon(config: Config, step: int) -> float:
    """The chance of a random action: 1 until learning begins, then down in a straight line."""
    share = (step - config.replay_start) / config.epsilon_steps
    return 1 - (1 - config.epsilon_end) * min(max(share, 0.0), 1.0)


def plain_copy(model: nn.Module) -> nn.Module:
    """A network without v and g that is not trained. See Note [plain copies]."""
    copy = deepcopy(model)
    remove_weight_norm(copy)
    return copy.eval().requires_grad_(False)


@torch.no_grad()
def copy_plain(model: nn.Module, copy: nn.Module) -> None:
    """Bring a plain copy of the model up to date, buffers included."""
    for name, tensor in (*copy.named_parameters(), *copy.named_buffers()):
        tensor.copy_(attrgetter(name)(model))


def watch(actor: nn.Module, tester: Tester, epsilon: float) -> Tensor:
    """What a person sees of a new game's first steps: (steps, height, width, 3)."""
    tester.begin()
    screens = [torch.from_numpy(tester.game.screen())]
    while len(screens) < SHOWN and not tester.games:
        tester.play(actor, epsilon)
        screens.append(torch.from_numpy(tester.game.screen()))
    return torch.stack(screens)
