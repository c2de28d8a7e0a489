"""Checkpoints: every damaged byte is detected, and an intact generation is never lost."""

import os
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightnorm.lab.environment import random_state, set_random_state
from weightnorm.lab.files import load_state, previous, recover_state, save_state

STATE = {"weight": torch.arange(6.0), "epoch": 1, "metrics": [{"loss": 0.5}]}


def latest(path):
    """The state that a run continues from."""
    recover_state(path)
    return load_state(path)


@pytest.fixture
def path(tmp_path):
    """Two generations, of epochs 1 and 2."""
    path = tmp_path / "checkpoint.pt"
    for epoch in (1, 2):
        save_state(path, {**STATE, "epoch": epoch}, keep_previous=True)
    return path


def test_round_trip(path):
    assert torch.load(path, weights_only=True)["epoch"] == 2
    state = load_state(path)
    assert state["epoch"] == 2
    assert torch.equal(state["weight"], STATE["weight"])
    assert load_state(previous(path))["epoch"] == 1
    assert sorted(os.listdir(path.parent)) == ["checkpoint-previous.pt", "checkpoint.pt"]


def test_every_flipped_byte_is_detected(path):
    content = path.read_bytes()
    for i in range(len(content)):
        damaged = bytearray(content)
        damaged[i] ^= 1 << i % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="do not have the digest"):
            load_state(path)


@pytest.mark.parametrize("length", [0, 64, -1])
def test_truncated_checkpoint_falls_back(path, length):
    path.write_bytes(path.read_bytes()[:length])
    assert latest(path)["epoch"] == 1


def test_damaged_generation_never_replaces_the_intact_one(path, monkeypatch):
    path.write_bytes(b"")
    recover_state(path)
    assert not previous(path).exists()
    assert load_state(path)["epoch"] == 1

    def killed(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(path), "replace", killed)  # a kill before the first rename
    with pytest.raises(KeyboardInterrupt):
        save_state(path, STATE, keep_previous=True)
    assert load_state(path)["epoch"] == 1


def test_full_disk_keeps_both_generations(path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_state(path, {**STATE, "epoch": 3}, keep_previous=True)
    assert [load_state(p)["epoch"] for p in (path, previous(path))] == [2, 1]
    assert len(os.listdir(path.parent)) == 2


class Evil:
    def __reduce__(self):
        return os.mkdir, ("/tmp/weightnorm-checkpoint-executed",)


@given(st.binary(max_size=200) | st.just(pickle.dumps(Evil())))
def test_arbitrary_content_is_refused_and_not_executed(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("run") / "checkpoint.pt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="do not have the digest"):
        load_state(path)
    assert not os.path.exists("/tmp/weightnorm-checkpoint-executed")


class FakeDevices:
    """Random states of several devices of one type, as torch.cuda and torch.mps have them."""

    def __init__(self):
        self.states = {}

    def get_rng_state(self, *device):
        return self.states[device]

    def set_rng_state(self, state, *device):
        self.states[device] = state


def test_random_state_is_of_the_runs_own_device(monkeypatch):
    devices = FakeDevices()
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    first, last = torch.device("cuda:0"), torch.device("cuda:3")
    devices.states = {(last,): torch.tensor([3])}
    state = random_state(last)
    devices.states = {(first,): torch.tensor([0])}  # resumed where there is one device
    expected = torch.rand(3)
    set_random_state(state, first)
    assert devices.states == {(first,): torch.tensor([3])}
    assert torch.equal(torch.rand(3), expected)
    set_random_state(random_state(torch.device("cpu")), first)  # from a run on the CPU
    assert devices.states == {(first,): torch.tensor([3])}
    devices.states = {(): torch.tensor([5])}  # mps has one device and takes none
    state, devices.states = random_state(torch.device("mps:0")), {}
    set_random_state(state, torch.device("mps"))
    assert devices.states == {(): torch.tensor([5])}
