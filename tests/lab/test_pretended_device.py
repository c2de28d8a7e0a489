"""Training steps of every experiment on a pretended accelerator (tests/pretended_device.py)."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pretended_device import DEVICE, failures
from weightnorm import Parameterization
from weightnorm.lab import classify, dqn, draw, vae
from weightnorm.lab.data.labelled import Labelled
from weightnorm.lab.environment import Ranks
from weightnorm.lab.replay_buffer import Transitions
from weightnorm.lab.run import Run


class StepDone(Exception):
    """Ends an experiment after its training steps."""


class TwoStepRun(Run):
    """A run without a folder that ends after two training steps."""

    finished = None

    def __init__(self, name, config, presets, console=None, results=()):
        super().__init__(name, replace(config, device="cpu"), presets, console)
        self.device, self.ranks = torch.device(DEVICE), Ranks()

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def record_initialization(self, report): ...

    def restore(self, **stateful):
        return False

    def epochs(self, count):
        yield 0

    def _remaining(self, steps, *_):
        yield from steps[:2]
        raise StepDone


@contextmanager
def replaced(module, **attributes):
    before = {name: getattr(module, name) for name in attributes}
    for name, value in attributes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def train_steps(module, config, data):
    """Take the first two training steps of an experiment.

    Data-dependent initialization, which reads statistics by design, is left out.
    """
    stubs = {"Run": TwoStepRun, "load": lambda config: data()}
    if hasattr(module, "data_dependent_init"):
        stubs["data_dependent_init"] = lambda *_, **__: None
    with replaced(module, **stubs), pytest.raises(StepDone):
        module.run(config)


def images(count, *shape):
    return torch.randint(256, (count, *shape), dtype=torch.uint8)


def labelled():
    labels = torch.randint(10, (60,))
    return Labelled(torch.randn(60, 3, 32, 32), labels, torch.randn(9, 3, 32, 32), labels[:9], ())


def classify_steps(how):
    config = replace(classify.PRESETS["cpu"], parameterization=how, width=0.1, batch_size=20)
    train_steps(classify, config, labelled)


def vae_steps(preset, shape, how):
    config = replace(vae.PRESETS[preset], parameterization=how, width=0.2, batch_size=20, latents=4)
    train_steps(vae, config, lambda: (images(60, *shape), images(9, *shape)))


def draw_steps(how, attention=True):
    sizes = {"hidden": 6, "latent": 3, "steps": 2, "batch_size": 20, "attention": attention}
    config = replace(draw.PRESETS["cpu"], parameterization=how, **sizes)
    train_steps(draw, config, lambda: (images(60, 784) % 2, images(9, 784) % 2))


def dqn_updates(how):
    config = replace(dqn.PRESETS["cpu"], parameterization=how, width=0.125)
    game = SimpleNamespace(actions=4, shape=(84, 84))
    agent = dqn.Agent(config, game, torch.device(DEVICE))
    frames = images(8, 5, 84, 84)
    actions, rewards, terminal = torch.randint(4, (8,)), torch.randn(8), torch.zeros(8)
    for _ in range(2):
        agent.update(Transitions(frames[:, :-1], actions, rewards, terminal, frames[:, 1:]))
    agent.update_target()


def cpu_index():
    torch.zeros(4, device=DEVICE)[torch.zeros(2, dtype=torch.long)]


def mixed_devices():
    return torch.zeros(4, device=DEVICE) + torch.zeros(4)


def boolean_mask():
    x = torch.zeros(4, device=DEVICE)
    return x[x > 0]


READS = {
    "item": lambda: torch.zeros(4, device=DEVICE).sum().item(),
    "float": lambda: float(torch.zeros((), device=DEVICE)),
    "bool": lambda: bool(torch.zeros((), device=DEVICE) > 0),
    "tolist": lambda: torch.zeros(4, device=DEVICE).tolist(),
    "copy to the CPU": lambda: torch.zeros(4, device=DEVICE).cpu(),
    "copy into a CPU tensor": lambda: torch.zeros(4).copy_(torch.zeros(4, device=DEVICE)),
    "CPU index": cpu_index,
    "mixed devices": mixed_devices,
    "boolean mask": boolean_mask,
}
STEPS = {
    **{f"classify {how}": partial(classify_steps, how) for how in Parameterization},
    **{
        f"vae mnist {how}": partial(vae_steps, "cpu", (1, 28, 28), how)
        for how in vae.Config.COMPARED
    },
    **{
        f"vae cifar10 {how}": partial(vae_steps, "cpu cifar10", (3, 32, 32), how)
        for how in vae.Config.COMPARED
    },
    **{f"draw {how}": partial(draw_steps, how) for how in draw.Config.COMPARED},
    "draw without attention": partial(draw_steps, Parameterization.WEIGHT_NORM, attention=False),
    **{f"dqn {how}": partial(dqn_updates, how) for how in dqn.Config.COMPARED},
}
CASES = STEPS | READS


@pytest.fixture(scope="module")
def found():
    return failures(__file__)


@pytest.mark.parametrize("case", READS)
def test_reads_and_mixed_devices_are_found(case, found):
    assert found[case] != ""


@pytest.mark.parametrize("case", STEPS)
def test_training_steps_neither_read_nor_mix_devices(case, found):
    assert found[case] == ""
