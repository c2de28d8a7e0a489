"""Atari environments: observations against reference implementations, saving and restoring."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weightnorm.lab.atari import NO_OPS, Atari, Bilinear, rom_paths
from weightnorm.lab.errors import DataError


@pytest.fixture(scope="module")
def invaders():
    return Atari("space-invaders")


def play(game, actions):
    """Return (frame, reward, life lost, over) after each action; reset after the end of a game."""
    seen = []
    for action in actions:
        step = game.step(int(action) % game.actions)
        seen.append((step.frame.tobytes(), *step[1:]))
        if step.over:
            seen.append(game.reset().tobytes())
    return seen


def actions(count, seed=0):
    return np.random.default_rng(seed).integers(0, 18, count)


@pytest.mark.parametrize("shape", [(210, 160), (250, 160)])
def test_resizing_matches_torch_up_to_rounding(shape):
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    theirs = F.interpolate(torch.from_numpy(image)[None, None].double(), (84, 84), mode="bilinear")
    ours = torch.from_numpy(Bilinear(shape, (84, 84))(image))
    assert (ours - theirs[0, 0]).abs().max() <= 0.5 + 1e-9
    assert Bilinear(shape, (84, 84))(np.full(shape, 255, np.uint8)).min() == 255


@pytest.mark.parametrize("game", ["space-invaders", "breakout"])
def test_matches_ale_pys_vector_environment_at_full_size(game):
    """Greyscale, the maximum of two frames, rewards and lives; ale-py has no bilinear
    interpolation, so its frames are compared before resizing."""
    from ale_py import AtariVectorEnv

    theirs = AtariVectorEnv(
        game.replace("-", "_"), num_envs=1, num_threads=1, stack_num=1, noop_max=0,
        img_height=210, img_width=160, reward_clipping=False, use_fire_reset=False,
    )  # fmt: skip
    ours = Atari(game)
    theirs.reset(seed=1)
    theirs.step(np.zeros(1, np.int64))
    ours._reset(2)  # plus two frames of every reset: four, one step of theirs
    resize, lives = Bilinear((210, 160), (84, 84)), None
    losses = 0
    for action in actions(260):
        action = int(action) % ours.actions
        screen, reward, over, _, info = theirs.step(np.array([action]))
        step = ours.step(action)
        lost = lives is not None and info["lives"][0] < lives
        lives = info["lives"][0]
        assert (step.reward, step.life_lost, step.over) == (reward[0], lost, over[0])
        if step.over:
            break
        losses += lost
        assert (step.frame == resize(screen[0, 0])).all()
    assert losses
    theirs.close()


@pytest.mark.parametrize("game", ["breakout", "qbert"])
def test_restored_game_continues_identically(game):
    first = Atari(game)
    first.reset()
    play(first, actions(150))
    state, chances = first.state_dict(), torch.get_rng_state()
    expected = play(first, actions(250, seed=1))
    assert any(isinstance(seen, bytes) for seen in expected)  # a game ended on the way
    other = Atari(game)
    play(other, actions(20, seed=2))
    other.load_state_dict(state)
    torch.set_rng_state(chances)
    assert play(other, actions(250, seed=1)) == expected
    assert other.state_dict()["no_ops"] == first.state_dict()["no_ops"]


def test_game_starts_with_up_to_30_no_ops_that_follow_torchs_seed(invaders, monkeypatch):
    firsts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        firsts.append((invaders.reset().tobytes(), invaders.no_ops))
    assert firsts[0] == firsts[1] != firsts[2]
    monkeypatch.setattr(invaders, "_reset", lambda no_ops: no_ops)
    assert {invaders.reset() for _ in range(1000)} == set(range(NO_OPS + 1))


def test_no_sticky_actions_no_time_limit_minimal_action_set(invaders):
    assert invaders.emulator.getFloat("repeat_action_probability") == 0
    assert invaders.emulator.getInt("max_num_frames_per_episode") == 0
    assert invaders.actions == 6


def test_single_player_games_by_names_with_dashes():
    assert {"breakout", "enduro", "seaquest", "space-invaders", "pong"} <= set(rom_paths())
    assert "combat" not in rom_paths()
    with pytest.raises(DataError, match="no game 'combat'"):
        Atari("combat")
