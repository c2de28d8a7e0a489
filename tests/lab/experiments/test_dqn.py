"""Experiment 4 without processes: a game whose optimum is known, and each part of the algorithm."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from weightnorm import is_weight_normed
from weightnorm.lab.errors import ConfigError
from weightnorm.lab.experiments import dqn
from weightnorm.lab.experiments.dqn import Agent, epsilon, td_targets
from weightnorm.lab.rl import episodes
from weightnorm.lab.rl.atari import Step
from weightnorm.lab.rl.episodes import Player, choose
from weightnorm.lab.rl.replay_buffer import Batch, Replay
from weightnorm.lab.runs.config import folder

SIDE = 36
ALL = pytest.mark.parametrize("how", dqn.COMPARED)


class Corridor:
    """Five cells, a player in the middle who may go left (0) or right (1). The left end is worth
    ¼, the right end 10; either ends the game."""

    actions, shape = 2, (SIDE, SIDE)

    def __init__(self, name="corridor"):
        self.cell = 2

    def start(self):
        self.cell = 2
        return self.frame()

    def step(self, action):
        self.cell += 1 if action else -1
        over = self.cell in (0, 4)
        reward = {0: 0.25, 4: 10.0}.get(self.cell, 0.0)
        return Step(self.frame(), reward, life_lost=False, over=over)

    def frame(self):
        frame = np.zeros(self.shape, np.uint8)
        frame[:, 7 * self.cell : 7 * self.cell + 8] = 255
        return frame

    def screen(self):
        return np.repeat(self.frame()[:, :, None], 3, 2)

    def state_dict(self):
        return {"cell": self.cell}

    def load_state_dict(self, state):
        self.cell = state["cell"]


VALUES = {1: 0.81, 2: 0.9, 3: 1.0}
"""Of the cells, with rewards clipped at 1 and γ = 0.9."""


def cells(states):
    """Where the player is in each state."""
    return (states[:, -1, 0].float().argmax(1) // 7).tolist()


@pytest.fixture
def config(tmp_path):
    return replace(
        dqn.PRESETS["demo"], runs=tmp_path, width=0.125, epochs=2, train_steps=700, test_steps=60,
        replay_size=400, replay_start=100, init_states=64, batch_size=32, update_every=2,
        sync_every=40, epsilon_steps=500, test_epsilon=0.0, discount=0.9, learning_rate=0.003,
        value_std=1.0, device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize("how", ["standard", "weight-norm"])
def test_a_game_is_solved_to_its_optimum(config, how):
    how = dqn.Parameterization(how)
    record = dqn.run(replace(config, parameterization=how), game=Corridor)
    assert record.result["score"] == record.result["best_score"] == 10
    assert record.metrics[-1]["games"] == 30  # two steps each
    assert record.result["random_score"] < 8
    state = torch.load(record.folder / "checkpoint.pt", weights_only=True)
    valued = [VALUES[cell] for cell in cells(state["states"]["beginning"]["states"])]
    assert record.result["mean_q"] == pytest.approx(np.mean(valued), abs=0.03)
    assert not (record.folder / "replay.bin").exists()
    with np.load(record.folder / "game.npz") as kept:
        assert kept["frames"].shape == (3, SIDE, SIDE, 3)


def agent_of(config, how="standard"):
    how = dqn.Parameterization(how)
    return Agent(replace(config, parameterization=how), Corridor(), torch.device("cpu"))


def lived(path, actions):
    """A replay in which the corridor was walked."""
    player, replay = Player(Corridor()), Replay(path, 100, (SIDE, SIDE))
    replay.see(player.start())
    for action in actions:
        step = player.step(action)
        replay.record(action, min(max(step.reward, -1), 1), step.over or step.life_lost)
        replay.see(step.frame)
    return replay


def test_targets_by_hand(tmp_path):
    """right, right, left, left: the two that end a game get their reward alone."""
    replay = lived(tmp_path / "ring", [1, 1, 0, 0])
    value_of_cell = torch.tensor([0.0, 5.0, 6.0, 7.0, 0.0])
    batch = replay.draw(200)
    next_q = torch.stack([value_of_cell[cells(batch.next_states)] - 1] * 2, 1)
    next_q[:, 1] += 1
    aims = td_targets(batch.rewards, batch.terminal, next_q, 0.5)
    walked = zip(cells(batch.states), batch.actions.tolist(), aims.tolist(), strict=True)
    assert set(walked) == {(2, 1, 3.5), (3, 1, 1.0), (2, 0, 2.5), (1, 0, 0.25)}


@ALL
def test_an_update_is_a_step_on_the_summed_huber_loss(config, tmp_path, how):
    agent = agent_of(config, how)
    replay = lived(tmp_path / "ring", [1, 1, 0, 0, 1, 0, 1, 1] * 5)
    agent.begin(replay.draw(40).states.clone())
    batch = replay.draw(16)
    model = agent.model
    copy = dqn.deepcopy(model)
    with torch.no_grad():
        aims = (
            batch.rewards + 0.9 * (1 - batch.terminal) * agent.target(batch.next_states).max(1)[0]
        )
    errors = copy(batch.states)[range(16), batch.actions] - aims
    small = errors.abs() < 1
    assert 0 < small.sum() < 16  # both sides of the clip
    expected = torch.where(small, errors**2 / 2, errors.abs() - 0.5).sum()
    optimizer = torch.optim.Adamax(copy.parameters(), lr=0.003, betas=(0.5, 0.999))
    expected.backward()
    optimizer.step()
    assert agent.learn(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@ALL
def test_the_plain_copies_compute_what_the_network_does_in_evaluation(config, tmp_path, how):
    agent = agent_of(config, how)
    replay = lived(tmp_path / "ring", [0, 1, 1, 0] * 20)
    agent.begin(replay.draw(40).states.clone())
    for _ in range(3):
        agent.learn(replay.draw(16))
    states = replay.draw(10).states
    expected = agent.model.eval()(states)
    agent.model.train()
    torch.testing.assert_close(agent.actor(states), expected)  # kept up to date by learning
    assert not torch.allclose(agent.target(states), expected)  # and this one is not
    agent.sync()
    torch.testing.assert_close(agent.target(states), expected)
    for copy in (agent.actor, agent.target):
        assert not any(is_weight_normed(module) for module in copy.modules())
        assert not any(p.requires_grad for p in copy.parameters())
        assert not copy.training
    trained = [b for b in agent.model.buffers() if b.is_floating_point()]
    copied = [b for b in agent.target.buffers() if b.is_floating_point()]
    assert len(trained) == (10 if how is dqn.Parameterization.BATCH_NORM else 0)
    assert all(map(torch.equal, trained, copied))


@ALL
@pytest.mark.parametrize("std", [1.0, 0.01])
def test_learning_begins_with_the_spread_asked_for(config, tmp_path, how, std):
    agent, seen = agent_of(replace(config, value_std=std), how), []
    states = lived(tmp_path / "ring", [0, 1, 1, 0, 1, 0, 0] * 12).draw(50).states.clone()
    agent.begin(states)
    last = [m for m in agent.model.modules() if isinstance(m, (nn.Linear, nn.BatchNorm1d))][-1]
    last.register_forward_hook(lambda m, i, o: seen.append(o))
    agent.model(states)
    assert seen[0].mean(0).abs().max() < 1e-3 * std
    torch.testing.assert_close(
        seen[0].std(0, correction=0), torch.full((2,), std), atol=0, rtol=1e-3
    )


def test_the_steps_at_which_things_happen(config, monkeypatch):
    """Random play until the start, then updates every 2 and copies to the target every 10 steps."""
    begun, learned, synced, chances, replays = [], [], [], [], []
    now = lambda: replays[0].steps  # noqa: E731

    class Watched(Replay):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            replays.append(self)

    class WatchedAgent(Agent):
        def begin(self, states):
            super().begin(states)
            begun.append((now(), len(states)))

        def learn(self, batch):
            learned.append(now())
            return super().learn(batch)

        def sync(self):
            synced.append(now())
            super().sync()

    def watched_choose(actor, state, chance, actions):
        chances.append(chance)
        return choose(actor, state, chance, actions)

    monkeypatch.setattr(dqn, "Replay", Watched)
    monkeypatch.setattr(dqn, "Agent", WatchedAgent)
    monkeypatch.setattr(dqn, "choose", watched_choose)
    dqn.run(
        replace(config, epochs=1, train_steps=40, replay_start=15, sync_every=10, epsilon_steps=10),
        game=Corridor,
    )
    assert begun == [(15, 64)]
    assert learned == list(range(16, 41, 2))
    assert synced == [15, 20, 30, 40]
    assert chances[:16] == [1.0] * 16
    assert chances[16:26] == pytest.approx([0.91 - 0.09 * i for i in range(10)])
    assert chances[26:] == pytest.approx([0.1] * 14)


class Lives(Corridor):
    """Three steps lose a life, six end the game; each step is worth −5."""

    def start(self):
        self.count = 0
        return super().start()

    def step(self, action):
        self.count += 1
        frame = np.full(self.shape, self.count, np.uint8)
        return Step(frame, -5.0, life_lost=self.count == 3, over=self.count == 6)


def test_a_lost_life_ends_an_episode_in_training_only(config, monkeypatch):
    kept = []
    monkeypatch.setattr(Replay, "discard", lambda self: kept.append(self))
    record = dqn.run(
        replace(config, epochs=1, train_steps=36, replay_start=12, test_steps=20), game=Lives
    )
    (replay,) = kept
    assert replay.terminal[:12].tolist() == [0, 0, 1, 0, 0, 1] * 2
    assert set(replay.rewards[:12].tolist()) == {-1.0}  # clipped
    assert record.metrics[0]["score"] == -30.0  # not clipped, and over all lives
    assert record.metrics[0]["games"] == 3  # the fourth was not played to its end
    assert record.result["random_score"] == -30.0


def test_an_unfinished_game_counts_only_if_there_is_no_other():
    tester = episodes.Tester(Lives())
    tester.begin()
    actor = nn.Sequential(nn.Flatten(), nn.Linear(4 * SIDE * SIDE, 2))
    for _ in range(5):
        tester.play(actor, 1.0)
    assert (tester.games, tester.score) == (0, -25.0)
    for _ in range(3):
        tester.play(actor, 1.0)
    assert (tester.games, tester.score) == (1, -30.0)
    tester.begin()
    assert (tester.games, tester.score) == (0, 0.0)


def test_the_testers_state_is_the_games_last_four_frames():
    tester = episodes.Tester(Lives())
    tester.begin()
    actor = nn.Sequential(nn.Flatten(), nn.Linear(4 * SIDE * SIDE, 2))
    seen = [tester.frames[0, :, 0, 20].tolist()]
    for _ in range(7):
        tester.play(actor, 1.0)
        seen.append(tester.frames[0, :, 0, 20].tolist())
    assert seen[:6] == [
        [0, 0, 0, 255], [0, 0, 255, 1], [0, 255, 1, 2], [255, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]
    ]  # fmt: skip
    assert seen[6:] == [[0, 0, 0, 255], [0, 0, 255, 1]]


def test_epsilon_falls_in_a_straight_line():
    paper = dqn.PAPER
    assert epsilon(paper, 0) == epsilon(paper, 50_000) == 1
    assert epsilon(paper, 550_000) == pytest.approx(0.55)
    assert epsilon(paper, 1_050_000) == epsilon(paper, 9_000_000) == pytest.approx(0.1)


def test_a_random_action_is_any_and_a_greedy_one_the_best():
    values = torch.tensor([[0.0, 3.0, 1.0]])
    actor = nn.Linear(1, 3)
    nn.init.zeros_(actor.weight)
    with torch.no_grad():
        actor.bias.copy_(values[0])
    state = lambda: torch.zeros(1, 1)  # noqa: E731
    assert {choose(actor, state, 0.0, 3) for _ in range(20)} == {1}
    drawn = torch.bincount(torch.tensor([choose(actor, state, 0.5, 3) for _ in range(600)]))
    assert (drawn / 600).tolist() == pytest.approx([1 / 6, 4 / 6, 1 / 6], abs=0.06)


# — settings —


def test_the_presets_keep_the_papers_settings():
    paper = dqn.PRESETS["paper"]
    assert (paper.epochs, paper.train_steps, paper.test_steps) == (200, 250_000, 125_000)
    assert (paper.replay_size, paper.replay_start) == (1_000_000, 50_000)
    assert (paper.epsilon_steps, paper.epsilon_end, paper.test_epsilon) == (1_000_000, 0.1, 0.05)
    assert (paper.update_every, paper.sync_every) == (4, 10_000)
    assert (paper.batch_size, paper.discount, paper.init_states) == (64, 0.99, 500)
    for name, preset in dqn.PRESETS.items():
        assert preset.preset == name
        same = ("update_every", "discount", "epsilon_end", "test_epsilon", "game")
        assert all(getattr(preset, field) == getattr(paper, field) for field in same)
    rates = {str(how): rate for how, rate in dqn.LEARNING_RATES["paper"].items()}
    assert rates == {"standard": 0.0001, "weight-norm": 0.0003, "batch-norm": 0.0003}
    grid = {0.0001: 0.0003, 0.0003: 0.001}  # a step further, where there are fewer updates
    for preset in ("cpu", "demo"):
        assert {how: grid[rates[str(how)]] for how in dqn.COMPARED} == dqn.LEARNING_RATES[preset]


def test_a_game_has_a_folder_of_its_own():
    config = replace(dqn.PRESETS["cpu"], game="pong", seed=3)
    where = folder("dqn", config, dqn.PRESETS)
    assert where == Path("runs/dqn/cpu/pong/weight-norm/lr-0.0003/seed-3")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("test_steps", 0),
        ("width", 0.0),
        ("batch_size", 1),
        ("init_states", 1),
        ("update_every", 0),
        ("sync_every", 0),
        ("discount", 1.5),
        ("epsilon_end", -0.1),
        ("test_epsilon", 2.0),
        ("epsilon_steps", 0),
        ("replay_start", 250_000),
        ("replay_size", 1000),
        ("parameterization", dqn.Parameterization.MEAN_ONLY_BATCH_NORM),
    ],
)
def test_impossible_values_are_refused(field, value):
    with pytest.raises(ConfigError, match=rf"{field.replace('_', '-')} is {value}; expected"):
        replace(dqn.PAPER, **{field: value})


@pytest.mark.parametrize(
    ("game", "near"),
    [("space-invader", "space-invaders"), ("SpaceInvaders", "space-invaders"), ("pang", "pong")],
)
def test_an_unknown_game_is_answered_with_the_nearest(game, near):
    with pytest.raises(ConfigError, match=rf"game is {game}; expected one of ale-py's: .*{near}"):
        replace(dqn.PAPER, game=game)


def test_batches_move_to_a_device(tmp_path):
    batch = lived(tmp_path / "ring", [1, 1]).draw(3).to(torch.device("meta"))
    assert isinstance(batch, Batch)
    assert all(x.device.type == "meta" for x in vars(batch).values())
