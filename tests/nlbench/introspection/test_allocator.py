"""Freed memory that the C library keeps, or returns to the system."""

import subprocess
import sys

import pytest

FAULTS = """
import resource
from nlbench.introspection.allocator import keep_freed_memory, release_freed_memory

def pages_taken():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"1") * 2**24 for _ in range(4)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if KEPT:
    keep_freed_memory()
counts = [pages_taken() for _ in range(3)]
release_freed_memory()
print(counts[0], counts[2], pages_taken())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the settings are Linux's")
@pytest.mark.parametrize("is_kept", [False, True])
def test_freed_memory_is_reused_until_released(is_kept):
    code = FAULTS.replace("KEPT", str(is_kept))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, again, released = map(int, done.stdout.split())
    assert (again < first / 4) == is_kept
    assert released > first / 4
