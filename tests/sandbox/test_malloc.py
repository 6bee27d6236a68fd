"""Where memory is limited, a retry's large blocks go back whole when they are freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys
from contextlib import nullcontext
from oomdoctor.sandbox.reserve import large_blocks_apart
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_size_t,), (ctypes.c_void_p,)
def data():
    return int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize() >> 20
def left(size):
    # Every second block is freed, so that what is free lies between what is in use.
    blocks = [libc.malloc(size) for _ in range(20)]
    before = data()
    for block in blocks[::2]:
        libc.free(block)
    gone = before - data()
    for block in blocks[1::2]:
        libc.free(block)
    return gone
libc.free(libc.malloc(30 << 20))  # from now on glibc takes blocks of up to 30 MiB from its heap
if "limited" in sys.argv:
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, resource.getrlimit(resource.RLIMIT_DATA)[1]))
with large_blocks_apart():
    print(left(8 << 20))
print(left(8 << 20))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's, and limits on memory are Linux's")
@pytest.mark.parametrize(
    ("said", "apart"),
    [(("limited",), True), ((), False), (("limited", "MALLOC_MMAP_THRESHOLD_=33554432"), False)],
)
def test_what_is_freed_between_blocks_in_use_goes_back(said: tuple[str, ...], apart: bool) -> None:
    env = [one for one in said if "=" in one]
    command = ["env", *env, sys.executable, "-c", PROGRAM, *said]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    within, after = map(int, done.stdout.split())
    assert within >= 80 if apart else within < 16
    assert after < 16, "and a program goes on as fast as it did"
