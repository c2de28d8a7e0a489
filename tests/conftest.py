"""Every test starts from the same random state, and can be interrupted."""

import signal

import pytest
import torch
from hypothesis import settings

settings.register_profile("house", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("house")

# In the background of a shell SIGINT is ignored, and then by all that the tests start, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
