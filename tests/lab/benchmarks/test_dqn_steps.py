"""The benchmark of DQN: what it compares is the same agent."""

from dataclasses import replace

import torch

from weightnorm import Parameterization, normalized_weights
from weightnorm.lab.benchmarks import dqn_steps
from weightnorm.lab.benchmarks.dqn_steps import STANDARD, TORCHS, WEIGHT_NORM, TorchsAgent
from weightnorm.lab.data.atari import Atari
from weightnorm.lab.data.replay import Batch
from weightnorm.lab.experiments import dqn


def test_torchs_agent_learns_what_ours_does():
    game = Atari("pong")
    config = replace(dqn.PAPER, width=0.125, parameterization=Parameterization.WEIGHT_NORM)
    frames = torch.randint(0, 256, (30, 5, 84, 84), dtype=torch.uint8)
    actions, rewards = torch.randint(0, game.actions, (30,)), torch.randn(30)
    batch = Batch(frames[:, :-1], actions, rewards, torch.zeros(30), frames[:, 1:])
    losses, values = [], []
    for kind in (dqn.Agent, TorchsAgent):
        torch.manual_seed(0)
        agent = kind(config, game, torch.device("cpu"))
        agent.begin(frames[:, :-1])
        losses.append(torch.stack([agent.learn(batch) for _ in range(4)]))
        agent.sync()
        values.append(agent.target(batch.states))
        assert len(normalized_weights(agent.model)) == 5
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(*values, rtol=1e-2, atol=1e-2)


def test_it_prints_every_agent(capsys, monkeypatch):
    monkeypatch.setattr(dqn_steps, "find_spec", lambda name: None)
    sizes = {"--game": "pong", "--width": "0.125", "--batch-size": "4", "--rounds": "1"}
    sizes |= {"--steps": "8", "--start": "20", "--threads": str(torch.get_num_threads())}
    speeds = dqn_steps.main([word for pair in sizes.items() for word in pair])
    assert list(speeds) == [STANDARD, WEIGHT_NORM, TORCHS]
    assert all(speed > 0 for speed in speeds.values())
    out = capsys.readouterr().out
    assert all(name in out for name in speeds)
