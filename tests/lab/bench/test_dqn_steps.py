"""The DQN benchmark compares equal agents, in processes of their own."""

import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from weightnorm import Parameterization, normalized_weights
from weightnorm.lab import dqn
from weightnorm.lab.atari import Atari
from weightnorm.lab.bench.benchmark import Settings
from weightnorm.lab.bench.cases import dqn_steps
from weightnorm.lab.bench.cases.dqn_steps import BFLOAT16, STANDARD, TORCH, TorchAgent
from weightnorm.lab.bench.peers import OURS
from weightnorm.lab.bench.processes import in_processes
from weightnorm.lab.bench.statistics import Rounds
from weightnorm.lab.replay_buffer import Transitions


def test_torch_agent_learns_the_same_as_ours():
    game = Atari("pong")
    config = replace(dqn.PAPER, width=0.125, parameterization=Parameterization.WEIGHT_NORM)
    frames = torch.randint(0, 256, (30, 5, 84, 84), dtype=torch.uint8)
    actions, rewards = torch.randint(0, game.actions, (30,)), torch.randn(30)
    batch = Transitions(frames[:, :-1], actions, rewards, torch.zeros(30), frames[:, 1:])
    losses, values = [], []
    for kind in (dqn.Agent, TorchAgent):
        torch.manual_seed(0)
        agent = kind(config, game, torch.device("cpu"))
        agent.initialize(frames[:, :-1])
        losses.append(torch.stack([agent.update(batch) for _ in range(4)]))
        agent.update_target()
        values.append(agent.target(batch.states))
        normalized = (
            agent.optimizer.parts() if kind is dqn.Agent else normalized_weights(agent.model)
        )
        assert len(normalized) == 5
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(*values, rtol=1e-2, atol=1e-2)


@contextmanager
def in_this_process(makers):
    yield {name: make() for name, make in makers.items()}


@pytest.mark.parametrize("sets", [[], ["avx512_bf16"]])
def test_peers_that_are_not_available_are_left_out_and_named(sets, monkeypatch):
    monkeypatch.setattr(dqn_steps, "find_spec", lambda name: None)
    monkeypatch.setattr(dqn_steps, "instruction_sets", lambda: sets)
    monkeypatch.setattr(dqn_steps, "in_processes", in_this_process)
    settings = Settings(torch.device("cpu"), quick=True)
    for case in dqn_steps.cases(settings):
        assert list(case.peers) == [STANDARD, *[BFLOAT16] * len(sets), OURS, TORCH]
        assert "not available: Stable-Baselines3" in case.name
        assert (BFLOAT16 in case.name) == (not sets)
        for goal in case.goals:
            goal.value(Rounds({peer: np.ones(2) for peer in case.peers}))
        for call in case.peers.values():
            call()


def writes_its_process(path):
    def step():
        with path.open("a") as file:
            file.write(f"{os.getpid()}\n")

    return step


def fail():
    raise FileNotFoundError("absent")


def test_steps_run_in_another_process(tmp_path):
    path = tmp_path / "processes"
    with in_processes({"one": partial(writes_its_process, path)}) as steps:
        for done in (1, 2):
            steps["one"]()
            pids = path.read_text().split()
            assert len(pids) == done  # a step is over when it returns
    assert len(set(pids)) == 1
    assert int(pids[0]) != os.getpid()
    assert not Path(f"/proc/{pids[0]}").exists()


def test_a_step_that_cannot_be_made_is_an_error(capfd):
    with pytest.raises(FileNotFoundError, match="absent"), in_processes({"none": fail}):
        pass
