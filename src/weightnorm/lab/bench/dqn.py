"""Training steps per second of DQN agents.

Agents of one size play the same game with the paper's settings: four steps, then an update on 64
transitions. The lab's agent, standard and weight-normalized; with torch's parametrization, which
recomputes every weight for each action and each target; and the DQN of Stable-Baselines3, if it is
installed (extra `bench`): as it is, and with the lab's environment and memory allocation, which
leaves only the agents to be compared. Each runs in a process of its own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

from weightnorm import Parameterization
from weightnorm.lab import dqn
from weightnorm.lab.atari import Atari, Game
from weightnorm.lab.bench.benchmark import Benchmark, Case, Settings, Summary, at_most, cpu
from weightnorm.lab.bench.peers import OURS, PARAMETRIZATION
from weightnorm.lab.dqn import Agent, Config, InitialBaseline, Player, train_step
from weightnorm.lab.interleaved import Call
from weightnorm.lab.pool import call_state, worker_processes
from weightnorm.lab.replay_buffer import ReplayBuffer

STANDARD, BFLOAT16 = "standard", "standard, bfloat16"
TORCH = PARAMETRIZATION
Step = Callable[[], None]
PEER = "Stable-Baselines3"
PEER_ON_OURS = "Stable-Baselines3 in our environment"
NEEDED = {PEER_ON_OURS: ("stable_baselines3",), PEER: ("stable_baselines3", "cv2")}


class TorchAgent(Agent):
    """Agent whose online, acting and target networks use torch's parametrization."""

    def __init__(self, config: Config, game: Game, device: torch.device) -> None:
        standard = replace(config, parameterization=Parameterization.STANDARD)
        super().__init__(standard, game, device)
        for layer in [m for m in self.model if isinstance(m, (nn.Conv2d, nn.Linear))]:
            parametrizations.weight_norm(layer)
        self.actor, self.target = self.model, deepcopy(self.model).requires_grad_(False)
        self.networks = self.model, self.target
        self.optimizer = torch.optim.Adamax(
            self.model.parameters(), lr=config.rate, betas=(0.5, 0.999)
        )

    def update_actor(self) -> None: ...

    def update_target(self) -> None:
        self.target.load_state_dict(self.model.state_dict())


@contextmanager
def in_processes(makers: Mapping[str, Callable[[], Step]]) -> Iterator[dict[str, Call]]:
    """Make each step in a process of its own, so that memory allocation of one does not affect the
    others; yield functions that run them."""
    with ExitStack() as stack:
        pools = {
            name: stack.enter_context(
                worker_processes(1, make, threads=torch.get_num_threads(), keep_memory=name != PEER)
            )
            for name, make in makers.items()
        }
        for ready in [pool.submit(os.getpid) for pool in pools.values()]:
            ready.result()
        yield {name: partial(_call, pool) for name, pool in pools.items()}


def _call(pool: ProcessPoolExecutor) -> None:
    pool.submit(call_state).result()


def learner(config: Config, kind: type[Agent], steps: int) -> Step:
    """An agent past its first replay_start steps; a call trains for `steps` steps."""
    player, baseline = Player(Atari(config.game), lives_end=True), InitialBaseline()
    agent = kind(config, player.game, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:  # the file is deleted, its memory map remains
        replay = ReplayBuffer(Path(folder, "replay.bin"), config.replay_size, player.game.shape)
    replay.start(player.start())

    def play(count: int) -> None:
        for _ in range(count):
            train_step(agent, player, replay, baseline)

    play(config.replay_start)
    return lambda: play(steps)


def peer(config: Config, ours: bool, steps: int) -> Step:
    """Stable-Baselines3 with the same network, optimizer, batch and number of updates."""
    vectors = import_module("stable_baselines3.common.vec_env")
    if ours:
        environment = vectors.DummyVecEnv([lambda: gym_of(config.game)])
    else:
        import_module("ale_py")  # registers the games with Gymnasium
        name = config.game.title().replace("-", "") + "NoFrameskip-v4"
        environment = import_module("stable_baselines3.common.env_util").make_atari_env(name)
    model = import_module("stable_baselines3").DQN(
        "CnnPolicy",
        vectors.VecFrameStack(environment, 4),
        learning_rate=config.rate,
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
    """The lab's environment with Gymnasium's interface."""
    import gymnasium

    class Environment(gymnasium.Env[Any, Any]):
        def __init__(self) -> None:
            self.game = Atari(name)
            shape = (*self.game.shape, 1)
            self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
            self.action_space = gymnasium.spaces.Discrete(self.game.actions)

        def reset(self, **_: Any) -> Any:
            return self.game.reset()[:, :, None], {}

        def step(self, action: Any) -> Any:
            step = self.game.step(int(action))
            return step.frame[:, :, None], step.reward, step.over, False, {}

    return Environment()


def cases(settings: Settings) -> Iterator[Case]:
    """Agents that train, each in its process; a call is some steps."""
    start, steps = settings.size(1000, 20), settings.size(20, 8)
    config = replace(
        dqn.PAPER,
        game=settings.size(dqn.PAPER.game, "pong"),
        batch_size=settings.size(64, 4),
        width=settings.size(1.0, 0.125),
        replay_start=start,
        replay_size=10 * start,
        epsilon_steps=1,
    )
    standard = replace(config, parameterization=Parameterization.STANDARD)
    makers = {
        STANDARD: partial(learner, standard, Agent, steps),
        BFLOAT16: partial(learner, replace(standard, precision="bfloat16"), Agent, steps),
        OURS: partial(learner, config, Agent, steps),
        TORCH: partial(learner, config, TorchAgent, steps),
        PEER_ON_OURS: partial(peer, config, True, steps),
        PEER: partial(peer, config, False, steps),
    }
    missing = [name for name, needed in NEEDED.items() if not all(map(find_spec, needed))]
    limits = {PEER_ON_OURS: 1.0, PEER: 0.667}
    goals = [at_most(STANDARD, limits[name], name) for name in NEEDED if name not in missing]
    if "avx512_bf16" not in cpu()["instruction_sets"]:
        missing.append(BFLOAT16)  # emulated, many times slower
    elif PEER not in missing:
        goals.append(at_most(BFLOAT16, limits[PEER], PEER))
    without = f" (not available: {'; '.join(missing)})" if missing else ""
    with in_processes({name: makers[name] for name in makers if name not in missing}) as calls:
        yield Case(
            f"an update on 64 transitions every 4 steps{without}",
            calls,
            base=STANDARD,
            limits=(at_most(OURS, 1.02, STANDARD), *goals),
            examples=steps,
            summary=(Summary("DQN", OURS, TORCH),),
            at_least_base=(OURS, TORCH),
        )


BENCHMARK = Benchmark("dqn", "Training of DQN, steps per second", cases)
