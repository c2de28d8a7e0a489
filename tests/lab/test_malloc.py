"""Freed memory stays with the process."""

import subprocess
import sys

import pytest

from weightnorm.lab.malloc import keep_freed_memory

COUNT_FAULTS = """
import resource, torch
from weightnorm.lab.malloc import keep_freed_memory
if {keep}: keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step(): torch.zeros(16 << 20); torch.ones(16 << 20)
for _ in range(6): step()
before = faults(); step(); print(faults() - before)
"""


def faults_of_a_step(keep: bool) -> int:
    """Pages of memory that a step has to fetch, after several like it."""
    words = [sys.executable, "-c", COUNT_FAULTS.format(keep=keep)]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not keep_freed_memory(), reason="the C library is not glibc")
def test_a_step_finds_the_memory_that_the_last_one_freed():
    assert faults_of_a_step(keep=False) > 100
    assert faults_of_a_step(keep=True) < 100
