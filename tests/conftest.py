"""Common setup: the same random state for every test, and SIGINT enabled."""

import signal

import pytest
import torch
from hypothesis import settings

settings.register_profile("fixed", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("fixed")

# A shell ignores SIGINT in background jobs, and child processes inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
