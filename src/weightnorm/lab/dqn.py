"""Experiment 4: deep Q-networks on Atari games (section 5.4).

The agent of Mnih et al. (2015), trained with Adamax at β₁ = 0.5 and batches of 64, in the standard
parameterization and with weight normalization. Batch normalization, which the paper could not make
work, can be run as well. An epoch is a number of training steps, then a number of evaluation steps.

The paper does not say on how many states the network is initialized (here 500, whose action values
have std `value_std`), nor from when ε is annealed: here from the first update, when the replay
buffer has its first transitions. Other deviations and the results: docs/experiments/dqn.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from weightnorm import (
    InitReport,
    Parameterization,
    WeightNormOptimizer,
    data_dependent_init,
    parameterize,
    update_running_means,
)
from weightnorm.lab.atari import Atari, Game, Pixels, Step, rom_paths
from weightnorm.lab.config import Count, Positive, Probability, Range, RunConfig, Several
from weightnorm.lab.environment import autocast
from weightnorm.lab.errors import nearest, require
from weightnorm.lab.records import RunRecord
from weightnorm.lab.replay_buffer import HISTORY, ReplayBuffer, Transitions
from weightnorm.lab.run import Run

Layer = TypeVar("Layer", nn.Conv2d, nn.Linear)

NAME = "dqn"
TITLE = "deep Q-networks on Atari games (section 5.4)"
METRIC = "best_score"
"""Selects the best learning rate of a sweep, as in the paper's figure 4."""
HIGHER_IS_BETTER = ("best_score", "score")
AXES = {"games": "game"}
"""Further axes of a sweep: flag → config field."""
PAPERS_GAMES = ("breakout", "enduro", "seaquest", "space-invaders")
RESULTS = ("best_score", "score", "mean_q", "random_score")
"""Metrics of every result: those that `sweep --metric` accepts."""
RECORDED_STEPS = 150
"""Steps of the last agent's play that are stored as pictures."""


@dataclass(frozen=True)
class Config(RunConfig):
    """Train a deep Q-network on an Atari game."""

    # Defaults without a source are those of Mnih et al. (2015): DeepMind's code, and
    # github.com/spragunr/deep_q_rl.

    game: str = "space-invaders"
    """Any single-player game of ale-py, such as breakout, enduro, seaquest or space-invaders."""
    epochs: Count = 200
    """Number of epochs: training steps, then evaluation steps."""
    train_steps: Count = 250_000
    """Training steps of the agent per epoch; each is four frames of the game."""
    test_steps: Count = 125_000
    """Evaluation steps per epoch."""
    width: Annotated[float, Range(0.02, 64)] = 1.0
    """Multiplier of the network's 32, 64 and 64 channels and 512 units."""
    batch_size: Several = 64
    """Transitions per update (section 5.4)."""
    replay_size: Count = 1_000_000
    """Capacity of the replay buffer, in transitions."""
    replay_start: Count = 50_000
    """Steps of random play before the first update."""
    update_every: Count = 4
    """Steps between updates."""
    sync_every: Count = 10_000
    """Steps between copies of the network to the target network."""
    discount: Probability = 0.99
    """Discount factor γ."""
    epsilon_steps: Count = 1_000_000
    """Steps over which ε falls linearly from 1 to its final value."""
    epsilon_end: Probability = 0.1
    """Final ε in training."""
    test_epsilon: Probability = 0.05
    """ε in evaluation."""
    init_states: Several = 500
    """States for the data-dependent initialization, our choice; their mean value is logged every
    epoch."""
    value_std: Positive = 1.0
    """Standard deviation of the initial action values over those states (section 3)."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Data type of the networks in updates (autocast); parameters are float32."""

    FOLDER_FIELDS: ClassVar[tuple[str, ...]] = ("game", "parameterization")
    COMPARED: ClassVar = (
        Parameterization.STANDARD,
        Parameterization.WEIGHT_NORM,
        Parameterization.BATCH_NORM,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        start, size = self.replay_start, self.replay_size
        require(start + self.update_every <= self.train_steps, "replay_start", start,
                "less than train-steps by at least update-every")  # fmt: skip
        require(size >= start, "replay_size", size, "replay-start or more")
        if self.game not in PAPERS_GAMES:  # of which no ROM has to be looked up
            nearest(self.game, rom_paths(), "game")

    @property
    def default_rate(self) -> float:
        """The paper's choice from {0.0001, 0.0003, 0.001, 0.003}, which gives none for batch norm;
        for a hundredth of the steps the next higher rate of that grid."""
        plain, paper = self.parameterization is Parameterization.STANDARD, self.preset == "paper"
        if plain:
            return 0.0001 if paper else 0.0003
        return 0.0003 if paper else 0.001


PAPER = Config(about="50 million steps, replay of 1 million, 7.4 GB, a GPU, a week")
CPU = replace(
    PAPER,
    preset="cpu",
    about="500 thousand steps, half the width, batches of 32, two cores, an hour",
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
        about="3 thousand steps, half the width, a minute, too short to learn",
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


# — the network —


class QNetwork(nn.Sequential):
    """Three convolutions, a layer of 512 units, a value for each action; ReLU between.

    The network of Mnih et al. (2015), initialized as in section 3: v ~ N(0, 0.05²). With batch norm
    the values themselves are not normalized: their scale would be that of batch norm's γ, which
    starts small and follows the targets by one learning rate per update.
    """

    def __init__(
        self,
        actions: int,
        shape: tuple[int, int] = (84, 84),
        *,
        how: Parameterization = Parameterization.STANDARD,
        width: float = Config.width,
    ) -> None:
        first, second, third, hidden = (round(n * width) for n in (32, 64, 64, 512))
        inputs = third * convolved(shape[0]) * convolved(shape[1])

        def initialized(layer: Layer) -> Layer:
            nn.init.normal_(layer.weight, std=0.05)
            return layer

        def layer(plain: Layer) -> nn.Module:
            return parameterize(initialized(plain), how)

        super().__init__(
            ScaledPixels(),  # (B, 4, 84, 84)
            layer(nn.Conv2d(HISTORY, first, 8, 4)),  # (B, 32, 20, 20)
            nn.ReLU(True),
            layer(nn.Conv2d(first, second, 4, 2)),  # (B, 64, 9, 9)
            nn.ReLU(True),
            layer(nn.Conv2d(second, third, 3, 1)),  # (B, 64, 7, 7)
            nn.ReLU(True),
            nn.Flatten(),
            layer(nn.Linear(inputs, hidden)),  # (B, 512)
            nn.ReLU(True),
            initialized(nn.Linear(hidden, actions)),
        )
        self.to(memory_format=torch.channels_last)  # type: ignore


class ScaledPixels(nn.Module):
    """Scales uint8 pixels to [0, 1], in channels-last layout, where convolutions are fastest."""

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.to(torch.float32, copy=True, memory_format=torch.channels_last)
        return scaled.mul_(1 / 255)


def convolved(side: int) -> int:
    """Return the height (or width) of the convolutions' output.

    >>> convolved(84)
    7
    """
    for kernel, stride in ((8, 4), (4, 2), (3, 1)):
        side = (side - kernel) // stride + 1
    return side


# — training —


def run(
    config: Config, console: Console | None = None, game: Callable[[str], Game] = Atari
) -> RunRecord:
    """Train and evaluate one agent, and return its record."""
    with Run(NAME, config, PRESETS, console, RESULTS) as run, replay_file(run) as path:
        if (record := run.finished) is not None:
            return record
        ranks = run.ranks.world
        require(ranks == 1, "ranks", ranks, "1: DQN is one process; run seeds with sweep --jobs")
        player = Player(game(config.game), lives_end=True)
        evaluator = Player(game(config.game), lives_end=False)
        shape, pin, baseline = player.game.shape, run.device.type == "cuda", InitialBaseline()
        replay = ReplayBuffer(path, config.replay_size, shape, pin=pin)
        agent = Agent(config, player.game, run.device)
        states = {"model": agent.model, "target": agent.target, "optimizer": agent.optimizer}
        states |= {"replay": replay, "player": player, "evaluator": evaluator, "baseline": baseline}
        if run.restore(**states):
            agent.update_actor()
        else:
            replay.start(player.start())

        for _ in run.epochs(config.epochs):
            for step in run.steps(config.train_steps + config.test_steps, replay.margin // 2):
                if step < config.train_steps:
                    loss = train_step(agent, player, replay, baseline, run.record_initialization)
                    if loss is not None:
                        run.add(loss=loss, count=config.batch_size)
                    continue
                if step == config.train_steps:
                    evaluator.start()
                evaluator.play_step(agent.actor, config.test_epsilon)
            run.log(
                score=evaluator.score,
                games=evaluator.games,
                train_score=player.score,
                mean_q=agent.max_q(baseline.states).mean().item(),
                loss=run.mean("loss"),
                epsilon=epsilon(config, replay.steps),
            )
            player.reset_score()

        run.save_arrays("game", frames=record_episode(agent.actor, evaluator, config.test_epsilon))
        best = max(row["score"] for row in run.metrics)
        last = {name: run.last[name] for name in ("score", "mean_q")}
        return run.finish({"best_score": best, **last, "random_score": baseline.score})


@contextmanager
def replay_file(run: Run) -> Iterator[Path]:
    """Provide the path of the replay file, and delete the file if the run has a result.

    The result may be from an earlier process, killed before it deleted the file.
    """
    path = run.folder / "replay.bin"
    try:
        yield path
    finally:
        if (run.folder / "result.json").exists():
            path.unlink(missing_ok=True)


class Agent:
    """The online network, which also acts, and the target network.

    Note [weight norm in the optimizer]
        Weights are read far more often than they change: by every action and every target. So the
        networks have plain weights, and `WeightNormOptimizer` trains v and g. An action costs the
        same with weight norm as without, and nothing has to be copied for it.

    With batch norm a copy in evaluation mode acts, with the running averages.
    """

    def __init__(self, config: Config, game: Game, device: torch.device) -> None:
        self.config, self.device = config, device
        how = config.parameterization
        plain = Parameterization.STANDARD if how.normalizes_weights else how
        self.model = QNetwork(game.actions, game.shape, how=plain, width=config.width).to(device)
        self.target = frozen_copy(self.model)
        self.actor = frozen_copy(self.model) if how.uses_batch else self.model
        options: dict[str, Any] = {"lr": config.rate, "betas": (0.5, 0.999)}  # section 5.4
        self.optimizer: torch.optim.Optimizer
        if how.normalizes_weights:
            self.optimizer = WeightNormOptimizer(self.model, torch.optim.Adamax, **options)
            # As in section 3, initialization changes g and leaves v as drawn. A loaded state
            # sets ‖v‖; otherwise it would be that of the weights at the first update.
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        else:
            self.optimizer = torch.optim.Adamax(self.model.parameters(), **options)
        self.networks: tuple[Any, Any] = self.model, self.target
        if config.compile:
            self.networks = torch.compile(self.model), torch.compile(self.target)

    def initialize(self, states: Tensor) -> InitReport:
        """Apply data-dependent initialization and update both copies."""
        states = states.to(self.device)
        target_std = {str(len(self.model) - 1): self.config.value_std}
        report = data_dependent_init(self.model, states, target_std=target_std)
        # The copies use running statistics, and have to start as the same function.
        update_running_means([states], self.model)
        self.update_actor()
        self.update_target()
        return report

    def update_actor(self) -> None:
        """Copy the online network's weights to the actor, if that is another network."""
        if self.actor is not self.model:
            self.actor.load_state_dict(self.model.state_dict())

    def update_target(self) -> None:
        """Copy the online network's weights to the target network."""
        self.target.load_state_dict(self.model.state_dict())

    @torch.no_grad()
    def max_q(self, states: Tensor) -> Tensor:
        """Return max Q(s, ·) of each state."""
        values: Tensor = self.actor(states.to(self.device)).amax(1)
        return values

    def update(self, batch: Transitions) -> Tensor:
        """Take one optimizer step and return the loss, summed over the batch."""
        batch, (model, target) = batch.to(self.device), self.networks
        with autocast(self.device, self.config.precision):
            with torch.no_grad():
                next_q = target(batch.next_states).float()
            values = model(batch.states).float()
        targets = td_targets(batch.rewards, batch.terminal, next_q, self.config.discount)
        q = values.gather(1, batch.actions[:, None]).squeeze(1)
        loss = F.huber_loss(q, targets, reduction="sum")  # gradient: the error, clipped to ±1
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.update_actor()
        return loss.detach()


def train_step(
    agent: Agent,
    player: Player,
    replay: ReplayBuffer,
    baseline: InitialBaseline,
    record: Callable[[InitReport], None] = lambda report: None,
) -> Tensor | None:
    """Act, store the transition, and update the networks when due. Return the loss of an update.

    `record` gets the report of data-dependent initialization, before the first update.
    """
    config, loss = agent.config, None
    action, step = player.play_step(agent.actor, epsilon(config, replay.steps))
    reward = min(max(step.reward, -1), 1)
    replay.append(action, reward, step.over or step.life_lost, step.frame)
    if replay.steps < config.replay_start:
        return None
    if replay.steps == config.replay_start:
        baseline.states = replay.sample(config.init_states).states.clone()
        baseline.score = player.score
        player.reset_score()
        record(agent.initialize(baseline.states))
    elif replay.steps % config.update_every == 0:
        loss = agent.update(replay.sample(config.batch_size))
    if replay.steps % config.sync_every == 0:
        agent.update_target()
    return loss


def td_targets(rewards: Tensor, terminal: Tensor, next_q: Tensor, discount: float) -> Tensor:
    """Return r + γ·max Q(s′, ·), or r where the life ended.

    >>> td_targets(torch.ones(2), torch.tensor([0.0, 1.0]), torch.tensor([[1.0, 3.0]] * 2), 0.5)
    tensor([2.5000, 1.0000])
    """
    return rewards + discount * (1 - terminal) * next_q.amax(1)


def epsilon(config: Config, step: int) -> float:
    """Return ε at a step: 1 until the first update, then falling linearly."""
    fraction = (step - config.replay_start) / config.epsilon_steps
    return 1 - (1 - config.epsilon_end) * min(max(fraction, 0.0), 1.0)


def frozen_copy(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode that is not trained."""
    return deepcopy(model).eval().requires_grad_(False)


# — episodes —


class Player:
    """Plays games one after the other, ε-greedily, and accumulates their returns.

    Args:
        game: the environment.
        lives_end: whether a lost life ends the episode, as in training: the state then has no
            frames from before it. The game goes on in any case, and its return counts all lives.
    """

    def __init__(self, game: Game, *, lives_end: bool) -> None:
        self.game, self.lives_end = game, lives_end
        self.state = torch.zeros(1, HISTORY, *game.shape, dtype=torch.uint8)
        """The last frames of the episode; those from before its first are zero."""
        self.total, self.games, self.current = 0.0, 0, 0.0

    def start(self) -> Pixels:
        """Start a new game, forget the score, and return the first frame."""
        self.reset_score()
        return self._show(self._reset(), first=True)

    def play_step(self, actor: nn.Module, epsilon: float) -> tuple[int, Step]:
        """Take a step and return its action. At the end of a game the frame is the first of the
        next one."""
        action = epsilon_greedy(actor, self.state, epsilon, self.game.actions)
        step = self.game.step(action)
        self.current += step.reward
        if step.over:
            self.total, self.games = self.total + self.current, self.games + 1
            step = step._replace(frame=self._reset())
        self._show(step.frame, first=step.over or (self.lives_end and step.life_lost))
        return action, step

    def _reset(self) -> Pixels:
        self.current = 0.0
        return self.game.reset()

    def _show(self, frame: Pixels, first: bool) -> Pixels:
        earlier = torch.zeros_like(self.state) if first else self.state
        self.state = torch.cat([earlier[:, 1:], torch.from_numpy(frame)[None, None]], 1)
        return frame

    def reset_score(self) -> None:
        """Forget the returns of the finished games."""
        self.total, self.games = 0.0, 0

    @property
    def score(self) -> float:
        """Mean return of the finished games; before the first has ended, its return so far."""
        return self.total / self.games if self.games else self.current

    def state_dict(self) -> dict[str, Any]:
        saved = ("state", "total", "games", "current")
        return {"game": self.game.state_dict(), **{name: getattr(self, name) for name in saved}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.game.load_state_dict(state["game"])
        self.state, self.total = state["state"], state["total"]
        self.games, self.current = state["games"], state["current"]


@torch.no_grad()
def epsilon_greedy(actor: nn.Module, state: Tensor, epsilon: float, actions: int) -> int:
    """Return a random action with probability ε, else the action of the highest value."""
    if torch.rand(()).item() < epsilon:
        return int(torch.randint(actions, ()))
    device = next(actor.parameters()).device
    return int(actor(state.to(device)).argmax())


class InitialBaseline:
    """Measurements before the first update, as a baseline of the agent.

    The score of random play, and the states whose mean value is recorded after each epoch.
    """

    def __init__(self) -> None:
        self.score = math.nan
        self.states = torch.empty(0, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        return {"score": self.score, "states": self.states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.score, self.states = state["score"], state["states"]


def record_episode(actor: nn.Module, evaluator: Player, epsilon: float) -> Tensor:
    """Return the screens of the first steps of a game: (steps, height, width, 3)."""
    evaluator.start()
    screens = [torch.from_numpy(evaluator.game.render())]
    while len(screens) < RECORDED_STEPS and not evaluator.games:
        evaluator.play_step(actor, epsilon)
        screens.append(torch.from_numpy(evaluator.game.render()))
    return torch.stack(screens)
