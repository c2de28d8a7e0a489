"""The replay buffer against a list of whole states: wrap-around, ends of lives, resuming."""

import os
import random

import numpy as np
import pytest
import torch

from weightnorm.lab.errors import DataError
from weightnorm.lab.replay_buffer import ReplayBuffer

SHAPE = (3, 5)


class Naive:
    """Reference: every transition with both of its states, in a list."""

    def __init__(self, capacity, history=4):
        self.capacity, self.history = capacity, history
        self.transitions, self.life = [], []

    def state(self):
        black = [np.zeros(SHAPE, np.uint8)] * self.history
        return np.stack([*black, *self.life][-self.history :])

    def append(self, action, reward, terminal, after):
        before = self.state()
        self.life = [] if terminal else self.life
        self.life.append(after)
        self.transitions.append((before, action, reward, terminal, self.state()))


def frame(number):
    """A frame of its own for each number, never all zero."""
    return np.full(SHAPE, number % 251 + 1, np.uint8) + np.arange(5, dtype=np.uint8) % 2


def append_random(buffers, steps, chance, life=0.15):
    """Append the same random transitions to all buffers."""
    for _ in range(steps):
        action, reward = chance.randrange(18), chance.choice([-1.0, 0.0, 0.5, 1.0])
        terminal, after = chance.random() < life, frame(chance.randrange(10**6))
        for buffer in buffers:
            buffer.append(action, reward, terminal, after)


def start(path, capacity=12, margin=6):
    replay, naive = ReplayBuffer(path, capacity, SHAPE, margin=margin), Naive(capacity)
    replay.start(frame(0))
    naive.life.append(frame(0))
    return replay, naive


def check(replay, naive, draws=40):
    """Sample with a known seed and compare every transition."""
    kept = naive.transitions[-naive.capacity :]
    torch.manual_seed(7)
    batch = replay.sample(draws)
    torch.manual_seed(7)
    oldest = len(naive.transitions) - len(kept)
    times = torch.randint(oldest, len(naive.transitions), (draws,)) - oldest
    for row, back in enumerate(times.tolist()):
        before, action, reward, terminal, after = kept[back]
        assert (batch.states[row].numpy() == before).all()
        found = (batch.actions[row], batch.rewards[row], batch.terminal[row])
        assert found == (action, reward, terminal)
        assert terminal or (batch.next_states[row].numpy() == after).all()


@pytest.mark.parametrize(("capacity", "life"), [(1, 0.15), (2, 0.6), (9, 0.15), (50, 0.0)])
def test_matches_a_list_of_transitions(tmp_path, capacity, life):
    chance = random.Random(capacity)
    replay, naive = start(tmp_path / "ring", capacity, margin=3)
    for _ in range(40):
        append_random([replay, naive], chance.randrange(1, 9), chance, life)
        check(replay, naive)
    assert replay.steps > 3 * replay.slots  # it has wrapped around, more than once


def test_each_frame_is_stored_once(tmp_path):
    replay = ReplayBuffer(tmp_path / "ring", 20, (84, 84), margin=5)
    marks = np.random.default_rng(0).integers(0, 256, (29, 84, 84), np.uint8)
    replay.start(marks[0])
    for mark in marks[1:]:
        replay.append(0, 0.0, False, mark)
    replay.state_dict()
    content = (tmp_path / "ring").read_bytes()
    assert all(content.count(mark.tobytes()) == 1 for mark in marks)
    assert len(content) / replay.slots == 84 * 84 + 6


@pytest.mark.parametrize("has_fallocate", [True, False])  # macOS and Windows have not
def test_disk_space_is_allocated_at_once(tmp_path, monkeypatch, has_fallocate):
    if not has_fallocate:
        monkeypatch.delattr(os, "posix_fallocate")
    for capacity, margin in ((1000, 2000), (50_000, 2500)):
        replay = ReplayBuffer(tmp_path / str(capacity), capacity, SHAPE)
        assert replay.margin == margin
        taken = (tmp_path / str(capacity)).stat()
        assert taken.st_blocks * 512 >= taken.st_size == replay.slots * (15 + 6)


def test_full_disk_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        ReplayBuffer(tmp_path / "ring", 1000, SHAPE)
    assert not (tmp_path / "ring").exists()


# — resuming —


def at_checkpoint(path, steps):
    """A buffer's state dict after some steps, and the reference."""
    replay, naive = start(path)
    append_random([replay, naive], steps, random.Random(0))
    return replay.state_dict(), naive


def resumed(path, state):
    replay = ReplayBuffer(path, 12, SHAPE, margin=6)
    replay.load_state_dict(state)
    return replay


@pytest.mark.parametrize("lost", [0, 1, 6])
def test_resuming_is_exact_up_to_margin_steps_after_the_checkpoint(tmp_path, lost):
    chance = random.Random(lost)
    replay, naive = start(tmp_path / "ring")
    append_random([replay, naive], 57, chance)
    state = replay.state_dict()
    append_random([replay], lost, chance)
    again = resumed(tmp_path / "ring", state)
    check(again, naive)
    append_random([again, naive], 40, chance)
    check(again, naive)


def test_resuming_beyond_the_margin_or_from_a_truncated_file_is_refused(tmp_path):
    replay, _ = start(tmp_path / "ring")
    append_random([replay], 57, random.Random(0), life=0)
    state = replay.state_dict()
    append_random([replay], 8, random.Random(0), life=0)
    with pytest.raises(DataError, match="damaged"):
        resumed(tmp_path / "ring", state)
    state, _ = at_checkpoint(tmp_path / "cut", 30)
    os.truncate(tmp_path / "cut", 90)
    with pytest.raises(DataError, match=r"cut is damaged.*delete the run's folder to start over"):
        resumed(tmp_path / "cut", state)


def test_missing_file_is_refused(tmp_path):
    state, _ = at_checkpoint(tmp_path / "ring", 5)
    (tmp_path / "ring").unlink()
    for _ in range(2):
        with pytest.raises(DataError, match="ring is missing; delete the run's folder to start"):
            resumed(tmp_path / "ring", state)
        assert not (tmp_path / "ring").exists()


def test_flipped_bit_is_refused_or_never_sampled(tmp_path):
    path = tmp_path / "ring"
    state, naive = at_checkpoint(path, 30)
    content, refused = path.read_bytes(), 0
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            again = resumed(path, state)
        except DataError:
            refused += 1
        else:
            check(again, naive)
    # The transitions that are sampled, their three earlier frames, and the newest frame.
    assert refused == (12 + 3) * (15 + 6) + 15


def test_restart_without_a_checkpoint_ignores_old_content(tmp_path):
    replay, naive = start(tmp_path / "ring")
    append_random([replay, naive], 200, random.Random(1))
    again, naive = start(tmp_path / "ring")
    append_random([again, naive], 2, random.Random(2))
    check(again, naive)
