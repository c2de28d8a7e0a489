"""Common setup: the same random state for every test, no global hooks, and SIGINT enabled."""

import signal

import pytest
import torch
from hypothesis import settings
from torch.nn.modules import module

settings.register_profile("fixed", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("fixed")

# A shell ignores SIGINT in background jobs, and child processes inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_global_hooks():
    """Remove the hook that torch 2.9 leaves behind when torch.export fails.

    With it, torch.compile of any module that assigns a buffer fails.
    """
    yield
    module._global_buffer_registration_hooks.clear()


@pytest.fixture(autouse=True)
def denormals():
    """Take back what a run, a claim or a benchmark inside this process has set for it."""
    yield
    torch.set_flush_denormal(False)
