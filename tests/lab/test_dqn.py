"""DQN: a game whose optimal values are known, each part of the algorithm, and its settings."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from weightnorm import (
    Parameterization,
    WeightNormOptimizer,
    parts,
    remove_weight_norm,
    weight_norm_model,
)
from weightnorm.lab import dqn
from weightnorm.lab.atari import Step
from weightnorm.lab.dqn import Agent, Player, QNetwork, epsilon, epsilon_greedy
from weightnorm.lab.errors import ConfigError, DataError, Diverged
from weightnorm.lab.replay_buffer import ReplayBuffer

SIDE = 36
ALL = pytest.mark.parametrize("how", dqn.Config.COMPARED)


class Corridor:
    """Five cells; the player starts in the middle and moves left (0) or right (1). The left end has
    reward ¼, the right end 10; both end the game."""

    actions, shape = 2, (SIDE, SIDE)

    def __init__(self, name="corridor"):
        self.cell = 2

    def reset(self):
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

    def render(self):
        return np.repeat(self.frame()[:, :, None], 3, 2)

    def state_dict(self):
        return {"cell": self.cell}

    def load_state_dict(self, state):
        self.cell = state["cell"]


class Lives(Corridor):
    """The third step loses a life, the sixth ends the game; each step has reward −5. A frame is the
    number of the step, 255 at the start."""

    def reset(self):
        self.count = 0
        return np.full(self.shape, 255, np.uint8)

    def step(self, action):
        self.count += 1
        frame = np.full(self.shape, self.count, np.uint8)
        return Step(frame, -5.0, life_lost=self.count == 3, over=self.count == 6)


class Counting(Corridor):
    """Every step ends the game; its reward is the number of steps so far. With `last`, the step
    after that one raises."""

    def __init__(self, name="corridor", last=math.inf):
        super().__init__()
        self.steps, self.last = 0, last

    def step(self, action):
        self.steps += 1
        if self.steps > self.last:
            raise RuntimeError("power failure")
        return super().step(action)._replace(reward=float(self.steps), over=True)


VALUES = {1: 0.81, 2: 0.9, 3: 1.0}
"""Values of the corridor's cells, with rewards clipped at 1 and γ = 0.9."""


def cells(states):
    """Return the player's cell in each state."""
    return (states[:, -1, 0].float().argmax(1) // 7).tolist()


@pytest.fixture
def config(tmp_path):
    return replace(
        dqn.PRESETS["demo"], out=tmp_path, width=0.125, epochs=2, train_steps=700, test_steps=60,
        replay_size=400, replay_start=100, init_states=64, batch_size=32, update_every=2,
        sync_every=40, epsilon_steps=500, test_epsilon=0.0, discount=0.9, learning_rate=0.003,
        value_std=1.0, device="cpu",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "precision", "error"),
    [("standard", "float32", 0.03), ("weight-norm", "bfloat16", 0.1)],
)
def test_corridor_is_solved_optimally(config, how, precision, error):
    how = Parameterization(how)
    record = dqn.run(replace(config, parameterization=how, precision=precision), game=Corridor)
    assert record.result["score"] == record.result["best_score"] == 10
    assert record.metrics[-1]["games"] == 30  # two steps each
    assert record.result["random_score"] < 8
    state = torch.load(record.folder / "checkpoint.pt", weights_only=True)
    valued = [VALUES[cell] for cell in cells(state["states"]["baseline"]["states"])]
    assert record.result["mean_q"] == pytest.approx(np.mean(valued), abs=error)
    with np.load(record.folder / "game.npz") as kept:
        assert kept["frames"].shape == (3, SIDE, SIDE, 3)

    assert not list(record.folder.glob("replay*"))
    (record.folder / "replay.bin").write_bytes(b"left by a kill between finish and delete")
    assert dqn.run(replace(config, parameterization=how, precision=precision)) == record
    assert not list(record.folder.glob("replay*"))


# — the network —


def test_layers_are_those_of_mnih_et_al():
    model, shapes = QNetwork(6), []
    sizes = [sum(p.numel() for p in m.parameters()) for m in model if list(m.parameters())]
    convolutions = [32 * (4 * 64 + 1), 64 * (32 * 16 + 1), 64 * (64 * 9 + 1)]
    assert sizes == [*convolutions, 512 * (3136 + 1), 6 * (512 + 1)]
    for module in model:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(lambda m, i, o: shapes.append(tuple(o.shape[1:])))
    model(torch.zeros(1, 4, 84, 84, dtype=torch.uint8))
    assert shapes == [(32, 20, 20), (64, 9, 9), (64, 7, 7), (512,), (6,)]
    half = [m.weight for m in QNetwork(18, width=0.5).modules() if hasattr(m, "weight")]
    assert [len(weight) for weight in half] == [16, 32, 32, 256, 18]


@ALL
def test_network_reads_pixels_over_255_in_channels_last(how):
    model = QNetwork(3, (SIDE, SIDE), how=how, width=0.125)
    x = torch.randint(0, 256, (5, 4, SIDE, SIDE), dtype=torch.uint8)
    before, expected = x.clone(), x.float() / 255
    for layer in list(model)[1:]:
        expected = layer(expected)
    torch.testing.assert_close(model(x), expected)
    assert torch.equal(x, before)
    expected.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)


# — the agent —


def agent_of(config, how="standard"):
    how = Parameterization(how)
    return Agent(replace(config, parameterization=how), Corridor(), torch.device("cpu"))


@pytest.fixture
def replay(tmp_path):
    """A replay buffer with transitions in the corridor."""
    game, replay = Corridor(), ReplayBuffer(tmp_path / "ring", 100, (SIDE, SIDE))
    replay.start(game.reset())
    for action in [1, 1, 0, 0, 1, 0, 1, 1] * 10:
        step = game.step(action)
        next_frame = game.reset() if step.over else step.frame
        replay.append(action, min(step.reward, 1), step.over, next_frame)
    return replay


def module_form(agent):
    """A copy of the model with weight norm in its modules, and the v and g of the optimizer."""
    copy = dqn.deepcopy(agent.model)
    if isinstance(agent.optimizer, WeightNormOptimizer):
        weight_norm_model(copy)
        with torch.no_grad():
            for name, (v, g) in agent.optimizer.parts().items():
                stored = parts(copy.get_submodule(name.removesuffix(".weight")))
                stored.v.copy_(v)
                stored.g.copy_(g)
    return copy


@ALL
def test_update_is_an_adamax_step_on_the_summed_huber_loss(config, replay, how):
    agent = agent_of(config, how)
    agent.initialize(replay.sample(40).states.clone())
    batch, copy = replay.sample(16), module_form(agent)
    with torch.no_grad():
        next_q = agent.target(batch.next_states).max(1)[0]
        targets = batch.rewards + 0.9 * (1 - batch.terminal) * next_q
    errors = copy(batch.states)[range(16), batch.actions] - targets
    small = errors.abs() < 1
    assert 0 < small.sum() < 16  # on both sides of the threshold
    expected = torch.where(small, errors**2 / 2, errors.abs() - 0.5).sum()
    optimizer = torch.optim.Adamax(copy.parameters(), lr=0.003, betas=(0.5, 0.999))
    expected.backward()
    optimizer.step()
    assert agent.update(batch).item() == pytest.approx(expected.item(), rel=1e-5)
    remove_weight_norm(copy)
    torch.testing.assert_close(dict(agent.model.named_parameters()), dict(copy.named_parameters()))


@ALL
def test_actor_follows_every_update_and_target_only_its_own(config, replay, how):
    agent, states = agent_of(config, how), replay.sample(40).states.clone()
    agent.initialize(states)
    copies = [agent.target] if agent.actor is agent.model else [agent.target, agent.actor]
    assert len(copies) == 1 + (how is Parameterization.BATCH_NORM)
    for copy in copies:  # batch norm's running variance is the unbiased one
        torch.testing.assert_close(copy(states), agent.model(states), rtol=0.05, atol=0.05)
        assert not any(p.requires_grad for p in copy.parameters())
        assert not copy.training
    for _ in range(3):
        agent.update(replay.sample(16))
    expected = agent.model.eval()(states).detach()
    agent.model.train()
    torch.testing.assert_close(agent.actor(states).detach(), expected)
    assert not torch.allclose(agent.target(states), expected)
    agent.update_target()
    torch.testing.assert_close(agent.target(states), expected)


@ALL
def test_initialization_sets_the_std_of_action_values_and_leaves_v_as_drawn(config, replay, how):
    agent, states = agent_of(replace(config, value_std=0.01), how), replay.sample(50).states.clone()
    drawn = {name: p.detach().clone() for name, p in agent.model.named_parameters()}
    agent.initialize(states)
    values = agent.model(states)  # not normalized
    assert values.mean(0).abs().max() < 1e-5
    std = values.std(0, correction=0)
    torch.testing.assert_close(std, torch.full((2,), 0.01), atol=0, rtol=1e-3)
    if how.normalizes_weights:
        assert len(agent.optimizer.parts()) == 5
        for name, (v, g) in agent.optimizer.parts().items():
            torch.testing.assert_close(v, drawn[name])
            assert not torch.allclose(g.flatten(), v.flatten(1).norm(dim=1))


# — the schedule —


def test_schedule_of_updates_target_copies_and_epsilon(config, monkeypatch):
    """Random play for 15 steps, then updates every 2 and target copies every 10 steps."""
    events = {"initialize": [], "update": [], "update_target": []}
    epsilons, replays = [], []
    monkeypatch.setattr(
        dqn, "ReplayBuffer", lambda *a, **k: replays.append(ReplayBuffer(*a, **k)) or replays[0]
    )

    def logged(method, seen):
        def call(agent, *inputs):
            seen.append(replays[0].steps)
            return method(agent, *inputs)

        return call

    for name, seen in events.items():
        monkeypatch.setattr(Agent, name, logged(getattr(Agent, name), seen))

    def logged_epsilon_greedy(actor, state, epsilon, actions):
        epsilons.append(epsilon)
        return epsilon_greedy(actor, state, epsilon, actions)

    monkeypatch.setattr(dqn, "epsilon_greedy", logged_epsilon_greedy)
    size = {"epochs": 1, "train_steps": 40, "replay_start": 15, "test_steps": 5}
    dqn.run(replace(config, **size, sync_every=10, epsilon_steps=10), game=Corridor)
    assert events["initialize"] == [15]
    assert events["update"] == list(range(16, 41, 2))
    assert events["update_target"] == [15, 20, 30, 40]
    assert epsilons[:16] == [1.0] * 16
    assert epsilons[16:26] == pytest.approx([0.91 - 0.09 * i for i in range(10)])
    assert epsilons[26:40] == pytest.approx([0.1] * 14)
    assert epsilons[40:45] == [0.0] * 5  # of the evaluation


def test_epsilon_greedy_probabilities():
    actor, state = nn.Linear(1, 3), torch.zeros(1, 1)
    with torch.no_grad():
        actor.bias.copy_(torch.tensor([0.0, 3.0, 1.0]))
    assert {epsilon_greedy(actor, state, 0.0, 3) for _ in range(20)} == {1}
    drawn = torch.bincount(torch.tensor([epsilon_greedy(actor, state, 0.5, 3) for _ in range(600)]))
    assert (drawn / 600).tolist() == pytest.approx([1 / 6, 4 / 6, 1 / 6], abs=0.06)


# — episodes —


def test_lost_life_is_terminal_in_training_only(config, monkeypatch):
    kept, start = [], ReplayBuffer.start

    def keep(self, frame):
        kept.append(self)
        start(self, frame)

    monkeypatch.setattr(ReplayBuffer, "start", keep)
    size = {"epochs": 1, "train_steps": 36, "replay_start": 12, "test_steps": 20}
    record = dqn.run(replace(config, **size), game=Lives)
    (replay,) = kept
    assert replay.terminal[:12].tolist() == [0, 0, 1, 0, 0, 1] * 2
    assert set(replay.rewards[:12].tolist()) == {-1.0}  # clipped
    assert record.metrics[0]["score"] == -30.0  # not clipped, and over all lives
    assert record.metrics[0]["games"] == 3  # the fourth is not finished
    assert record.result["random_score"] == -30.0


@pytest.mark.parametrize("lives_end", [True, False])
def test_state_is_the_last_four_frames_of_an_episode(lives_end):
    player = Player(Lives(), lives_end=lives_end)
    player.start()
    actor = nn.Sequential(nn.Flatten(), nn.Linear(4 * SIDE * SIDE, 2))
    states, scores = [], []
    for _ in range(8):
        states.append(player.state[0, :, 0, 20].tolist())
        scores.append((player.games, player.score))
        player.play_step(actor, 1.0)
    assert states[:3] == [[0, 0, 0, 255], [0, 0, 255, 1], [0, 255, 1, 2]]
    after_a_life = [[0, 0, 0, 3], [0, 0, 3, 4], [0, 3, 4, 5]]
    assert states[3:6] == (
        after_a_life if lives_end else [[255, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
    )
    assert states[6:] == [[0, 0, 0, 255], [0, 0, 255, 1]]
    assert scores[5:] == [(0, -25.0), (1, -30.0), (1, -30.0)]  # an unfinished game if there is none
    player.start()
    assert (player.games, player.score) == (0, 0.0)


def test_scores_are_those_of_an_epochs_own_games(config):
    config = replace(config, replay_start=10, train_steps=20, test_steps=5)
    record = dqn.run(config, game=Counting)
    assert record.result["random_score"] == 5.5  # steps 1 to 10
    assert record.column("train_score") == [15.5, 30.5]  # 11 to 20, 21 to 40
    assert record.column("score") == [3.0, 8.0]  # 1 to 5, 6 to 10 of the evaluator's game
    assert record.column("games") == [5, 5]
    assert record.column("epsilon") == pytest.approx([epsilon(config, 20), epsilon(config, 40)])


# — the replay file —


def test_diverged_run_deletes_the_replay_file(config):
    config = replace(config, learning_rate=1e38)
    for _ in range(2):  # and raises again when it is started again
        with pytest.raises(Diverged):
            dqn.run(config, game=Corridor)
        assert list(config.out.rglob("result.json"))
        assert not list(config.out.rglob("replay*"))


def test_damaged_or_missing_replay_file_is_refused(config):
    config = replace(config, checkpoint_seconds=0.0)
    with pytest.raises(RuntimeError, match="power failure"):
        dqn.run(config, game=partial(Counting, last=120))
    (path,) = config.out.rglob("replay.bin")
    content = bytearray(path.read_bytes())
    content[len(content) // 100] ^= 1  # among the first frames
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"replay.bin is damaged.*delete the run's folder"):
        dqn.run(config, game=Corridor)
    path.unlink()
    with pytest.raises(DataError, match=r"replay.bin is missing.*delete the run's folder"):
        dqn.run(config, game=Corridor)


# — settings —


def test_presets_have_the_papers_settings():
    paper = dqn.PRESETS["paper"]
    assert (paper.epochs, paper.train_steps, paper.test_steps) == (200, 250_000, 125_000)
    assert (paper.replay_size, paper.replay_start) == (1_000_000, 50_000)
    assert (paper.epsilon_steps, paper.epsilon_end, paper.test_epsilon) == (1_000_000, 0.1, 0.05)
    assert (paper.update_every, paper.sync_every) == (4, 10_000)
    assert (paper.batch_size, paper.discount, paper.init_states) == (64, 0.99, 500)
    for name, expected in {"paper": (1e-4, 3e-4, 3e-4), "cpu": (3e-4, 1e-3, 1e-3)}.items():
        chosen = [replace(dqn.PRESETS[name], parameterization=how).rate for how in ALL.args[1]]
        assert tuple(chosen) == expected


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("replay_start", 250_000, "replay-start is 250000; expected less than train-steps"),
        ("replay_size", 1000, "replay-size is 1000; expected replay-start or more"),
    ],
)
def test_impossible_settings_are_refused(field, value, message):
    with pytest.raises(ConfigError, match=message):
        replace(dqn.PAPER, **{field: value})


def test_a_misspelt_game_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="no game 'brakeout'; did you mean 'breakout'"):
        replace(dqn.PAPER, game="brakeout")
