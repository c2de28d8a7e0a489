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

    def append_frame(self, frame):
        self.life.append(frame)

    def state(self):
        black = [np.zeros(SHAPE, np.uint8)] * self.history
        return np.stack([*black, *self.life][-self.history :])

    def append_transition(self, action, reward, terminal, after):
        before = self.state()
        self.life = [] if terminal else self.life
        self.life.append(after)
        self.transitions.append((before, action, reward, terminal, self.state()))

    def at(self, back):
        return self.transitions[-self.capacity :][back]


def frame(number):
    """A frame of its own for each number, never all zero."""
    return np.full(SHAPE, number % 251 + 1, np.uint8) + np.arange(5, dtype=np.uint8) % 2


def append_random(replay, naive, steps, chance, life=0.15):
    """Append the same random transitions to both."""
    for _ in range(steps):
        action, reward = chance.randrange(18), chance.choice([-1.0, 0.0, 0.5, 1.0])
        terminal, after = chance.random() < life, frame(chance.randrange(10**6))
        naive.append_transition(action, reward, terminal, after)
        replay.append_transition(action, reward, terminal)
        replay.append_frame(after)


def start(path, capacity, **options):
    replay, naive = ReplayBuffer(path, capacity, SHAPE, **options), Naive(capacity)
    replay.append_frame(frame(0))
    naive.append_frame(frame(0))
    return replay, naive


def check(replay, naive, draws=40):
    """Sample with a known seed and compare every transition."""
    stored = min(len(naive.transitions), naive.capacity)
    torch.manual_seed(7)
    batch = replay.sample(draws)
    torch.manual_seed(7)
    oldest = len(naive.transitions) - stored
    times = torch.randint(oldest, len(naive.transitions), (draws,)) - oldest
    for row, back in enumerate(times.tolist()):
        before, action, reward, terminal, after = naive.at(back)
        assert (batch.states[row].numpy() == before).all()
        assert batch.actions[row] == action
        assert batch.rewards[row] == reward
        assert batch.terminal[row] == terminal
        assert terminal or (batch.next_states[row].numpy() == after).all()


@pytest.mark.parametrize("capacity", [1, 2, 9, 50])
@pytest.mark.parametrize("life", [0.0, 0.15, 0.6])
def test_matches_a_list_of_transitions(tmp_path, capacity, life):
    chance = random.Random(capacity)
    replay, naive = start(tmp_path / "ring", capacity, margin=3)
    for _ in range(40):
        append_random(replay, naive, chance.randrange(1, 9), chance, life)
        assert (replay.state()[0].numpy() == naive.state()).all()
        check(replay, naive)
    assert replay.steps > 3 * replay.slots  # it has wrapped around, more than once


def test_sampling_is_uniform_over_the_newest_transitions(tmp_path):
    replay = ReplayBuffer(tmp_path / "ring", 10, SHAPE, margin=0)
    for number in range(33):
        replay.append_frame(frame(0))
        replay.append_transition(number, 0.0, False)
    replay.append_frame(frame(0))
    counts = torch.bincount(replay.sample(5000).actions)
    assert counts.nonzero().flatten().tolist() == list(range(23, 33))
    assert counts[23:].min() > 400


def test_batches_reuse_memory(tmp_path):
    replay, naive = start(tmp_path / "ring", 20)
    append_random(replay, naive, 20, random.Random(0))
    first, second = replay.sample(8), replay.sample(8)
    assert first.states.data_ptr() == second.states.data_ptr()
    assert first.states.data_ptr() + 3 * 5 == first.next_states.data_ptr()  # four frames are shared


def test_each_frame_is_stored_once(tmp_path):
    replay = ReplayBuffer(tmp_path / "ring", 100, (84, 84), margin=5)
    marks = np.random.default_rng(0).integers(0, 256, (109, 84, 84), np.uint8)
    for mark in marks[:-1]:
        replay.append_frame(mark)
        replay.append_transition(0, 0.0, False)
    replay.append_frame(marks[-1])
    replay.state_dict()
    content = (tmp_path / "ring").read_bytes()
    assert all(content.count(mark.tobytes()) == 1 for mark in marks)
    bytes_a_slot = (tmp_path / "ring").stat().st_size / replay.slots
    assert bytes_a_slot == 84 * 84 + 6
    papers_slots = 1_000_000 + 1_000_000 // 20 + 4
    assert papers_slots * bytes_a_slot <= 7.5e9


def test_disk_space_is_allocated_at_once(tmp_path, monkeypatch):
    ReplayBuffer(tmp_path / "ring", 1000, SHAPE)
    taken = (tmp_path / "ring").stat()
    assert taken.st_blocks * 512 >= taken.st_size

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        ReplayBuffer(tmp_path / "other", 1000, SHAPE)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("lost", [0, 1, 6])
def test_resuming_is_exact_up_to_margin_steps_after_the_checkpoint(tmp_path, lost):
    margin, chance = 6, random.Random(lost)
    replay, naive = start(tmp_path / "ring", 12, margin=margin)
    append_random(replay, naive, 57, chance)
    state = replay.state_dict()
    append_random(replay, Naive(12), lost, chance)
    again = ReplayBuffer(tmp_path / "ring", 12, SHAPE, margin=margin)
    again.load_state_dict(state)
    assert (again.state()[0].numpy() == naive.state()).all()
    check(again, naive)
    append_random(again, naive, 40, chance)
    check(again, naive)


def test_resuming_beyond_the_margin_is_refused(tmp_path):
    replay, naive = start(tmp_path / "ring", 12, margin=6)
    append_random(replay, naive, 57, random.Random(0), life=0)
    state = replay.state_dict()
    append_random(replay, Naive(12), 8, random.Random(0), life=0)
    with pytest.raises(DataError, match="damaged"):
        ReplayBuffer(tmp_path / "ring", 12, SHAPE, margin=6).load_state_dict(state)


def at_checkpoint(path, steps):
    """A buffer's state dict after some steps, and the reference."""
    replay, naive = start(path, 12, margin=6)
    append_random(replay, naive, steps, random.Random(0))
    return replay.state_dict(), naive


def resumed(path, state):
    replay = ReplayBuffer(path, 12, SHAPE, margin=6)
    replay.load_state_dict(state)
    return replay


@pytest.mark.parametrize("steps", [0, 3, 30])
@pytest.mark.parametrize("size", [0, 1, 90])
def test_truncated_file_is_refused(tmp_path, steps, size):
    state, _ = at_checkpoint(tmp_path / "ring", steps)
    os.truncate(tmp_path / "ring", size)
    with pytest.raises(DataError, match=r"ring is damaged.*delete the run's folder to start over"):
        resumed(tmp_path / "ring", state)


@pytest.mark.parametrize("steps", [3, 17, 30])
def test_flipped_bit_is_refused_or_never_sampled(tmp_path, steps):
    path = tmp_path / "ring"
    state, naive = at_checkpoint(path, steps)
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
            check(again, naive, draws=100)
    transitions = min(steps, 12 + 3)  # those sampled, and their earlier frames
    assert refused == transitions * (15 + 6) + 15  # and the newest frame


def test_checkpoint_does_not_grow_with_the_buffer(tmp_path):
    small, large = (
        ReplayBuffer(tmp_path / str(capacity), capacity, SHAPE).state_dict()
        for capacity in (10, 10_000)
    )
    assert small.keys() == large.keys() == {"steps", "checksum"}
    assert all(isinstance(value, int) for value in large.values())


def test_restart_without_a_checkpoint_ignores_old_content(tmp_path):
    replay, naive = start(tmp_path / "ring", 12)
    append_random(replay, naive, 200, random.Random(1))
    again, naive = start(tmp_path / "ring", 12)
    assert (again.state()[0].numpy() == naive.state()).all()
    append_random(again, naive, 2, random.Random(2))
    check(again, naive)


def test_missing_file_is_refused(tmp_path):
    replay, naive = start(tmp_path / "ring", 12)
    append_random(replay, naive, 5, random.Random(1))
    state = replay.state_dict()
    (tmp_path / "ring").unlink()
    for _ in range(2):
        with pytest.raises(DataError, match="ring is missing; delete the run's folder to start"):
            ReplayBuffer(tmp_path / "ring", 12, SHAPE).load_state_dict(state)
        assert not (tmp_path / "ring").exists()


@pytest.mark.parametrize(("capacity", "margin"), [(10, 2000), (40_000, 2000), (100_000, 5000)])
def test_margin_is_a_twentieth_of_the_capacity_or_2000(tmp_path, capacity, margin):
    assert ReplayBuffer(tmp_path / "ring", capacity, (1, 1)).margin == margin
