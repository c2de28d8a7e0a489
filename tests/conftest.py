"""Every test starts from the same random state."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("house", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("house")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
