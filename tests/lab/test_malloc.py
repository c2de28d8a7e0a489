"""Freed memory is kept by the process."""

import subprocess
import sys

import pytest

from weightnorm.lab.environment import keep_freed_memory

COUNT_FAULTS = """
import resource, torch
from weightnorm.lab.environment import prepare_process
if {keep}: prepare_process()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step(): torch.zeros(16 << 20); torch.ones(16 << 20)
for _ in range(6): step()
before = faults(); step(); print(faults() - before)
"""


def faults_of_a_step(keep: bool) -> int:
    """Count the page faults of a step, after several equal ones."""
    words = [sys.executable, "-c", COUNT_FAULTS.format(keep=keep)]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not keep_freed_memory(), reason="the C library is not glibc")
def test_freed_memory_is_reused():
    # 128 MiB are 64 huge pages, which some systems use by themselves, or 32768 others.
    assert faults_of_a_step(keep=False) >= 64
    assert faults_of_a_step(keep=True) < 64
