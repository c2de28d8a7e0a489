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


def resized(image):
    """Bilinear interpolation pixel by pixel, in floats."""
    out = np.zeros((84, 84))
    height, width = image.shape
    for i in range(84):
        y = min(max((i + 0.5) * height / 84 - 0.5, 0), height - 1)
        for j in range(84):
            x = min(max((j + 0.5) * width / 84 - 0.5, 0), width - 1)
            for row in range(int(y), min(int(y) + 2, height)):
                for column in range(int(x), min(int(x) + 2, width)):
                    near = (1 - abs(y - row)) * (1 - abs(x - column))
                    out[i, j] += near * image[row, column]
    return out


def test_frame_is_the_maximum_of_two_greyscale_screens_resized(invaders):
    invaders.reset()
    play(invaders, actions(50))
    screens, grey = [], np.empty((210, 160), np.uint8)
    act = invaders.emulator.act

    def recording_act(action):
        reward = act(action)
        screens.append(invaders.emulator.getScreenGrayscale(grey) or grey.copy())
        return reward

    class RecordingEmulator:
        def __getattr__(self, name):
            return recording_act if name == "act" else getattr(emulator, name)

    emulator, invaders.emulator = invaders.emulator, RecordingEmulator()
    try:
        frame = invaders.step(1).frame
    finally:
        invaders.emulator = emulator
    assert len(screens) == 4
    assert (screens[2] != screens[3]).any()
    expected = resized(np.maximum(screens[2], screens[3]))
    assert frame.shape == (84, 84)
    assert frame.dtype == np.uint8
    assert np.abs(frame - expected).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("shape", [(210, 160), (250, 160)])
def test_resizing_matches_torch_up_to_rounding(shape):
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    theirs = F.interpolate(torch.from_numpy(image)[None, None].double(), (84, 84), mode="bilinear")
    ours = torch.from_numpy(Bilinear(shape, (84, 84))(image))
    assert (ours - theirs[0, 0]).abs().max() <= 0.5 + 1e-9
    assert Bilinear(shape, (84, 84))(np.full(shape, 255, np.uint8)).min() == 255


@pytest.mark.parametrize("game", ["space-invaders", "breakout"])
def test_matches_ale_pys_vector_environment_at_full_size(game):
    """ale-py has no bilinear interpolation, so its frames are compared before resizing."""
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


def test_game_starts_with_up_to_30_no_ops(invaders, monkeypatch):
    monkeypatch.setattr(invaders, "_reset", lambda no_ops: no_ops)
    seen = {invaders.reset() for _ in range(1000)}
    assert seen == set(range(NO_OPS + 1))


def test_random_starts_follow_torchs_seed(invaders):
    firsts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        firsts.append((invaders.reset().tobytes(), invaders.no_ops))
    assert firsts[0] == firsts[1] != firsts[2]


def test_lost_life_is_reported_and_does_not_end_the_game(invaders):
    invaders.reset()
    steps = [invaders.step(0) for _ in range(250)]
    lost = [i for i, step in enumerate(steps) if step.life_lost]
    assert lost
    assert not steps[lost[0]].over
    assert invaders.emulator.lives() < 3


def test_no_sticky_actions_no_time_limit_minimal_action_set(invaders):
    assert invaders.emulator.getFloat("repeat_action_probability") == 0
    assert invaders.emulator.getInt("max_num_frames_per_episode") == 0
    assert invaders.actions == 6


def test_render_is_in_colour(invaders):
    assert invaders.render().shape == (210, 160, 3)


def test_single_player_games_by_names_with_dashes():
    assert {"breakout", "enduro", "seaquest", "space-invaders", "pong"} <= set(rom_paths())
    assert "combat" not in rom_paths()
    assert len(rom_paths()) > 90
    with pytest.raises(DataError, match="no game 'combat'"):
        Atari("combat")
