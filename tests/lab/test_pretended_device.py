"""Training steps of every experiment on a pretended accelerator (tests/pretended_device.py)."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from pretended_device import DEVICE, failures
from weightnorm import Parameterization
from weightnorm.lab import classify, dqn, draw, language, vae
from weightnorm.lab.data import Labelled
from weightnorm.lab.environment import Ranks
from weightnorm.lab.language import Corpus
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


def train_steps(module, config, **stubs):
    """Take the first two training steps of an experiment.

    Data-dependent initialization, which reads statistics by design, is left out.
    """
    if hasattr(module, "data_dependent_init"):
        stubs["data_dependent_init"] = lambda *_, **__: None
    with patch.multiple(module, Run=TwoStepRun, **stubs), pytest.raises(StepDone):
        module.run(config)


def images(count, *shape):
    return torch.randint(256, (count, *shape), dtype=torch.uint8)


def classify_steps(how):
    config = replace(classify.PRESETS["cpu"], parameterization=how, width=0.1, batch_size=20)
    labels = torch.randint(10, (60,))
    data = Labelled(torch.randn(60, 3, 32, 32), labels, torch.randn(9, 3, 32, 32), labels[:9], ())
    train_steps(classify, config, load=lambda config: data)


def vae_steps(preset, shape, how):
    config = replace(vae.PRESETS[preset], parameterization=how, width=0.2, batch_size=20, latents=4)
    train_steps(vae, config, load=lambda config: (images(60, *shape), images(9, *shape)))


def draw_steps(how, attention=True):
    sizes = {"hidden": 6, "latent": 3, "steps": 2, "batch_size": 20, "attention": attention}
    config = replace(draw.PRESETS["cpu"], parameterization=how, **sizes)
    train_steps(draw, config, load=lambda config: (images(60, 784) % 2, images(9, 784) % 2))


def language_steps(optimizer, how):
    sizes = {"width": 16, "depth": 1, "heads": 2, "context": 16, "batch_size": 4, "eval_texts": 8}
    config = replace(
        language.PRESETS["cpu"], optimizer=optimizer, parameterization=how, steps=3, **sizes
    )
    corpus = Corpus(images(99), images(99), "digest", "2.13.0")
    stubs = {"load_torch_source": lambda: corpus, "record_corpus": lambda *_: None}
    train_steps(language, config, **stubs)


def dqn_updates(how):
    config = replace(dqn.PRESETS["cpu"], parameterization=how, width=0.125)
    game = SimpleNamespace(actions=4, shape=(84, 84))
    agent = dqn.Agent(config, game, torch.device(DEVICE))
    frames = images(8, 5, 84, 84)
    actions, rewards, terminal = torch.randint(4, (8,)), torch.randn(8), torch.zeros(8)
    for _ in range(2):
        agent.update(Transitions(frames[:, :-1], actions, rewards, terminal, frames[:, 1:]))
    agent.update_target()


def zeros(*shape):
    return torch.zeros(*shape, device=DEVICE)


READS = {
    "item": lambda: zeros(4).sum().item(),
    "float": lambda: float(zeros()),
    "bool": lambda: bool(zeros() > 0),
    "tolist": lambda: zeros(4).tolist(),
    "copy to the CPU": lambda: zeros(4).cpu(),
    "copy into a CPU tensor": lambda: torch.zeros(4).copy_(zeros(4)),
    "CPU index": lambda: zeros(4)[torch.zeros(2, dtype=torch.long)],
    "mixed devices": lambda: zeros(4) + torch.zeros(4),
    "boolean mask": lambda: zeros(4)[zeros(4) > 0],
}
WN = Parameterization.WEIGHT_NORM
# Layers of every parameterization: tests/test_pretended_device.py.
STEPS = {
    **{f"classify {how}": partial(classify_steps, how) for how in Parameterization},
    "vae mnist": partial(vae_steps, "cpu", (1, 28, 28), Parameterization.STANDARD),
    "vae cifar10": partial(vae_steps, "cpu cifar10", (3, 32, 32), WN),
    "draw": partial(draw_steps, WN),
    "draw without attention": partial(draw_steps, Parameterization.STANDARD, attention=False),
    "language adamw": partial(language_steps, "adamw", WN),
    "language muon": partial(language_steps, "muon", Parameterization.STANDARD),
    "dqn": partial(dqn_updates, WN),
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
