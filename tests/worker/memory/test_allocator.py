"""Memory that was free once is used again without being asked for from the system."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from spmd_tx.worker.memory.allocator import free_memory, keep_free_memory

if sys.argv[1] == "keep":
    keep_free_memory()

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(64 << 20, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults_of_a_step()
again = faults_of_a_step()
free_memory()
print(again, faults_of_a_step())
"""
PAGES = (64 << 20) // 4096


def faults(way: str) -> tuple[int, int]:
    """Page faults of a step that takes 64 MiB, the second time, and once more after free_memory."""
    environment = os.environ | {"NUMPY_MADVISE_HUGEPAGE": "0"}
    command = [sys.executable, "-c", FAULTS, way]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    again, after = map(int, ran.stdout.split())
    return again, after


@pytest.mark.skipif(sys.platform != "linux", reason="another C library")
def test_a_step_takes_the_memory_of_the_one_before_until_it_is_given_back():
    again, after = faults("keep")
    assert again < PAGES / 10
    assert after > PAGES / 2
