"""The replay against a list of whole states, through wrap-around, ends of lives and kills."""

import os
import random

import numpy as np
import pytest
import torch

from weightnorm.lab.errors import DataError
from weightnorm.lab.rl.replay_buffer import Replay

SHAPE = (3, 5)


class Naive:
    """Every transition with both of its states, in a list."""

    def __init__(self, capacity, history=4):
        self.capacity, self.history = capacity, history
        self.transitions, self.life = [], []

    def see(self, frame):
        self.life.append(frame)

    def state(self):
        black = [np.zeros(SHAPE, np.uint8)] * self.history
        return np.stack([*black, *self.life][-self.history :])

    def record(self, action, reward, terminal, after):
        before = self.state()
        self.life = [] if terminal else self.life
        self.life.append(after)
        self.transitions.append((before, action, reward, terminal, self.state()))

    def at(self, back):
        return self.transitions[-self.capacity :][back]


def frame(number):
    """No two alike, none black."""
    return np.full(SHAPE, number % 251 + 1, np.uint8) + np.arange(5, dtype=np.uint8) % 2


def live(replay, naive, steps, chance, life=0.15):
    """The same life in both."""
    for _ in range(steps):
        action, reward = chance.randrange(18), chance.choice([-1.0, 0.0, 0.5, 1.0])
        terminal, after = chance.random() < life, frame(chance.randrange(10**6))
        naive.record(action, reward, terminal, after)
        replay.record(action, reward, terminal)
        replay.see(after)


def start(path, capacity, **options):
    replay, naive = Replay(path, capacity, SHAPE, **options), Naive(capacity)
    replay.see(frame(0))
    naive.see(frame(0))
    return replay, naive


def check(replay, naive, draws=40):
    """Draw with known chances and compare every number."""
    held = min(len(naive.transitions), naive.capacity)
    torch.manual_seed(7)
    batch = replay.draw(draws)
    torch.manual_seed(7)
    oldest = len(naive.transitions) - held
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
def test_it_is_a_list_of_transitions(tmp_path, capacity, life):
    chance = random.Random(capacity)
    replay, naive = start(tmp_path / "ring", capacity, margin=3)
    for _ in range(40):
        live(replay, naive, chance.randrange(1, 9), chance, life)
        assert (replay.state()[0].numpy() == naive.state()).all()
        check(replay, naive)
    assert replay.steps > 3 * replay.slots  # it has wrapped around, more than once


def test_the_newest_are_drawn_all_alike(tmp_path):
    replay = Replay(tmp_path / "ring", 10, SHAPE, margin=0)
    for number in range(33):
        replay.see(frame(0))
        replay.record(number, 0.0, False)
    replay.see(frame(0))
    counts = torch.bincount(replay.draw(5000).actions)
    assert counts.nonzero().flatten().tolist() == list(range(23, 33))
    assert counts[23:].min() > 400


def test_a_batch_lies_in_the_same_memory_each_time(tmp_path):
    replay, naive = start(tmp_path / "ring", 20)
    live(replay, naive, 20, random.Random(0))
    first, second = replay.draw(8), replay.draw(8)
    assert first.states.data_ptr() == second.states.data_ptr()
    assert first.states.data_ptr() + 3 * 5 == first.next_states.data_ptr()  # four frames are shared


def test_no_frame_is_stored_twice(tmp_path):
    replay = Replay(tmp_path / "ring", 100, (84, 84), margin=5)
    marks = np.random.default_rng(0).integers(0, 256, (109, 84, 84), np.uint8)
    for mark in marks[:-1]:
        replay.see(mark)
        replay.record(0, 0.0, False)
    replay.see(marks[-1])
    replay.state_dict()
    content = (tmp_path / "ring").read_bytes()
    assert all(content.count(mark.tobytes()) == 1 for mark in marks)
    bytes_a_slot = (tmp_path / "ring").stat().st_size / replay.slots
    assert bytes_a_slot == 84 * 84 + 6
    papers_slots = 1_000_000 + 1_000_000 // 20 + 4
    assert papers_slots * bytes_a_slot <= 7.5e9


def test_the_disk_is_taken_at_once(tmp_path, monkeypatch):
    Replay(tmp_path / "ring", 1000, SHAPE)
    taken = (tmp_path / "ring").stat()
    assert taken.st_blocks * 512 >= taken.st_size

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Replay(tmp_path / "other", 1000, SHAPE)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("lost", [0, 1, 6])
def test_what_is_drawn_at_a_checkpoint_survives_as_many_steps_as_the_margin(tmp_path, lost):
    margin, chance = 6, random.Random(lost)
    replay, naive = start(tmp_path / "ring", 12, margin=margin)
    live(replay, naive, 57, chance)
    state = replay.state_dict()
    live(replay, Naive(12), lost, chance)
    again = Replay(tmp_path / "ring", 12, SHAPE, margin=margin)
    again.load_state_dict(state)
    assert (again.state()[0].numpy() == naive.state()).all()
    check(again, naive)
    live(again, naive, 40, chance)
    check(again, naive)


def test_beyond_the_margin_it_would_not(tmp_path):
    replay, naive = start(tmp_path / "ring", 12, margin=6)
    live(replay, naive, 57, random.Random(0), life=0)
    state = replay.state_dict()
    live(replay, Naive(12), 8, random.Random(0), life=0)
    again = Replay(tmp_path / "ring", 12, SHAPE, margin=6)
    again.load_state_dict(state)
    with pytest.raises(AssertionError):
        check(again, naive, draws=200)


def test_a_killed_beginning_leaves_nothing_behind(tmp_path):
    replay, naive = start(tmp_path / "ring", 12)
    live(replay, naive, 200, random.Random(1))
    again, naive = start(tmp_path / "ring", 12)
    assert (again.state()[0].numpy() == naive.state()).all()
    live(again, naive, 2, random.Random(2))
    check(again, naive)


def test_a_lost_file_is_named(tmp_path):
    replay, naive = start(tmp_path / "ring", 12)
    live(replay, naive, 5, random.Random(1))
    state = replay.state_dict()
    replay.discard()
    with pytest.raises(DataError, match="ring is missing; delete the run's folder to start over"):
        Replay(tmp_path / "ring", 12, SHAPE).load_state_dict(state)
