"""`keep_freed_memory` keeps freed memory in the process."""

import platform
import subprocess
import sys

import pytest

from tests.world.waiting import LIMIT_S

AGAIN = """
import ctypes, resource, sys
from leeway.common.process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory(largest=2**30, most=2**31 - 1)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def use():
    block = libc.malloc(ctypes.c_size_t(2**26))
    ctypes.memset(block, 1, 2**26)
    libc.free(block)
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_reused_without_page_faults():
    """Run in separate processes, because the setting is permanent. Huge pages cause few faults with any setting."""
    faults = {}
    for way in ("kept", "given back"):
        program = [sys.executable, "-c", AGAIN, way]
        faults[way] = int(subprocess.run(program, capture_output=True, check=True, timeout=LIMIT_S).stdout)
    assert faults["given back"] > 10 * max(1, faults["kept"]), faults
