"""How many steps an agent takes in a second: `python -m weightnorm.lab.benchmarks.dqn_steps`.

Agents of one size take turns at the same game with the paper's settings: four steps, then an update
on 64 transitions. The lab's own, standard and weight-normalized; the same with torch's
parametrization, which computes every weight anew for each action and each target; and, where it is
installed (the extra `bench`), the DQN of Stable-Baselines3: as it comes, and with our environment
and memory that is kept when freed, which leaves the agents alone to be compared. Each has a process
of its own.
"""

from __future__ import annotations

import argparse
import tempfile
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.utils import parametrizations

from weightnorm import Parameterization
from weightnorm.lab.allocation import keep_freed_memory
from weightnorm.lab.benchmarks.side_by_side import Step, apart, interleaved
from weightnorm.lab.data.atari import Atari, Game
from weightnorm.lab.data.replay import Replay
from weightnorm.lab.experiments import dqn
from weightnorm.lab.experiments.dqn import Agent, Config, train_step
from weightnorm.lab.experiments.players import Beginning, Player

STANDARD, WEIGHT_NORM = "standard", "weight norm"
TORCHS = "weight norm, torch's"
PEER = "Stable-Baselines3"
PEER_ON_OURS = "Stable-Baselines3, our environment and memory"
NEEDED = {PEER_ON_OURS: ("stable_baselines3",), PEER: ("stable_baselines3", "cv2")}


class TorchsAgent(Agent):
    """Weight norm as torch has it, in the network that learns, acts, and says what to aim at."""

    def __init__(self, config: Config, game: Game, device: torch.device) -> None:
        standard = replace(config, parameterization=Parameterization.STANDARD)
        super().__init__(standard, game, device)
        for layer in [m for m in self.model if isinstance(m, (nn.Conv2d, nn.Linear))]:
            parametrizations.weight_norm(layer)
        self.actor, self.target = self.model, deepcopy(self.model).requires_grad_(False)
        self.networks = self.model, self.target
        self.optimizer = torch.optim.Adamax(
            self.model.parameters(), lr=config.learning_rate, betas=(0.5, 0.999)
        )

    def refresh(self) -> None: ...

    def sync(self) -> None:
        self.target.load_state_dict(self.model.state_dict())


def learner(config: Config, kind: type[Agent], steps: int, threads: int) -> Step:
    """An agent that has begun to learn, with memory as a run has it; each turn is so many steps."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    player, beginning = Player(Atari(config.game)), Beginning()
    agent = kind(config, player.game, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:  # the file goes, its map stays
        replay = Replay(Path(folder, "replay.bin"), config.replay_size, player.game.shape)
    replay.see(player.start())

    def play(count: int) -> None:
        for _ in range(count):
            train_step(agent, player, replay, beginning)

    play(config.replay_start)
    return lambda: play(steps)


def peer(config: Config, ours: bool, steps: int, threads: int) -> Step:
    """Stable-Baselines3 with the same network, optimizer, batch and number of updates."""
    torch.set_num_threads(threads)
    vectors = import_module("stable_baselines3.common.vec_env")
    if ours:
        keep_freed_memory()
        environment = vectors.DummyVecEnv([lambda: gym_of(config.game)])
    else:
        import_module("ale_py")  # tells Gymnasium its games
        name = config.game.title().replace("-", "") + "NoFrameskip-v4"
        environment = import_module("stable_baselines3.common.env_util").make_atari_env(name)
    model = import_module("stable_baselines3").DQN(
        "CnnPolicy",
        vectors.VecFrameStack(environment, 4),
        learning_rate=config.learning_rate,
        buffer_size=config.replay_size,
        learning_starts=config.replay_start,
        batch_size=config.batch_size,
        gamma=config.discount,
        train_freq=config.update_every,
        gradient_steps=1,
        target_update_interval=config.sync_every,
        exploration_initial_eps=config.epsilon_end,
        exploration_final_eps=config.epsilon_end,
        policy_kwargs={
            "optimizer_class": torch.optim.Adamax,
            "optimizer_kwargs": {"betas": (0.5, 0.999)},
        },
        device="cpu",
    )
    model.learn(config.replay_start)
    return lambda: model.learn(steps, reset_num_timesteps=False)


def gym_of(name: str) -> Any:
    """The game as Gymnasium has environments."""
    import gymnasium

    class Environment(gymnasium.Env[Any, Any]):
        def __init__(self) -> None:
            self.game = Atari(name)
            shape = (*self.game.shape, 1)
            self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
            self.action_space = gymnasium.spaces.Discrete(self.game.actions)

        def reset(self, **_: Any) -> Any:
            return self.game.start()[:, :, None], {}

        def step(self, action: Any) -> Any:
            step = self.game.step(int(action))
            return step.frame[:, :, None], step.reward, step.over, False, {}

    return Environment()


def main(words: list[str] | None = None) -> dict[str, float]:
    """Print the table; the steps per second of each."""
    options = argparse.ArgumentParser(description="How many steps an agent takes in a second.")
    options.add_argument("--game", default=dqn.PAPER.game)
    options.add_argument("--batch-size", type=int, default=64)
    options.add_argument("--width", type=float, default=1.0, help="of our networks")
    options.add_argument("--steps", type=int, default=20, help="of each agent in a turn")
    options.add_argument("--start", type=int, default=1000, help="steps before the first update")
    options.add_argument("--rounds", type=int, default=40, help="turns of each agent")
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = options.parse_args(words)
    config = replace(
        dqn.PAPER, game=given.game, batch_size=given.batch_size, width=given.width,
        replay_start=given.start, replay_size=10 * given.start, epsilon_steps=1,
    )  # fmt: skip
    standard = replace(config, parameterization=Parameterization.STANDARD)
    turn = {"steps": given.steps, "threads": given.threads}
    makers = {
        STANDARD: partial(learner, standard, Agent, **turn),
        WEIGHT_NORM: partial(learner, config, Agent, **turn),
        TORCHS: partial(learner, config, TorchsAgent, **turn),
        PEER_ON_OURS: partial(peer, config, True, **turn),
        PEER: partial(peer, config, False, **turn),
    }
    missing = [name for name, needed in NEEDED.items() if not all(map(find_spec, needed))]
    if missing:
        Console().print(f"not installed: {'; '.join(missing)} (pip install 'weightnorm\\[bench]')")
    with apart({name: makers[name] for name in makers if name not in missing}) as turns:
        seconds = interleaved(turns, given.rounds)
    speeds = {name: given.steps / value for name, value in seconds.items()}
    base = speeds.get(PEER, speeds[STANDARD])
    table = Table("agent", "steps a second", f"to {PEER if PEER in speeds else STANDARD}")
    for name, speed in speeds.items():
        table.add_row(name, f"{speed:.1f}", f"{speed / base:.2f}")
    Console().print(table)
    return speeds


if __name__ == "__main__":
    main()
