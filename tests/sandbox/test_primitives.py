"""What oneDNN raises for want of memory, and what it raises otherwise in the same words."""

from __future__ import annotations

import errno
import mmap
import subprocess
import sys

import pytest

from oomdoctor.sandbox.primitives import is_short_of_memory

LIMITED = """
import resource, sys
import torch
from oomdoctor.sandbox.primitives import is_short_of_memory
torch.set_num_threads(1)
model, x = torch.nn.Conv2d(8, 16, 3), torch.randn(4, 8, 16, 16)
used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (int(sys.argv[1]) << 10), resource.RLIM_INFINITY))
try:
    model(x)
except RuntimeError as error:
    short = is_short_of_memory(error)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
    print(error, short, is_short_of_memory(error), is_short_of_memory(RuntimeError(*error.args)), len(model(x)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts what a process maps on Linux alone")
def test_a_primitive_that_the_system_had_no_memory_for_is_told_from_one_that_failed_otherwise() -> None:
    said = set()
    for room in (64, 32, 0, 128, 512):  # where oneDNN is refused memory that it does not ask after, it crashes instead
        done = subprocess.run([sys.executable, "-c", LIMITED, str(room)], check=False, capture_output=True, text=True)
        said.add(f"{done.stdout.strip() or done.stderr.strip()} ({done.returncode})")
        if done.stdout.startswith("could not create a primitive"):
            break
    assert "could not create a primitive True True False 4 (0)" in said, "what was found stays, and oneDNN goes on"


RESULT_GONE = """
import ctypes
import torch
from oomdoctor.sandbox import primitives
from oomdoctor.incident import from_exception
error = primitives.assemblers_error()
print(error is not None and error.value)
for value in (22, 3, 0):
    if error is not None:
        error.value = value
    found = from_exception(RuntimeError("could not create a primitive"), {})
    print(found.is_oom, found.format, error is not None and error.value)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the library's symbols are read on Linux alone")
def test_the_assembler_tells_what_was_wanting_when_the_result_is_gone_that_filled_the_memory() -> None:
    done = subprocess.run([sys.executable, "-c", RESULT_GONE], check=True, capture_output=True, text=True)
    assert done.stdout.split("\n")[:-1] == ["0", "True onednn 0", "False None 0", "False None 0"]


@pytest.mark.parametrize("what", ["create a primitive", "execute a primitive", "create a memory object"])
def test_each_of_its_words_is_asked_about(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert is_short_of_memory(RuntimeError(f"could not {what}"))
    assert not is_short_of_memory(RuntimeError(f"the model could not {what}"))


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_other_errors_are_not_asked_about() -> None:
    assert not is_short_of_memory(RuntimeError("could not create a primitive"))
    assert not is_short_of_memory(ValueError())
    assert not is_short_of_memory(RuntimeError())


WHILE_LOADING = """
import ctypes, faulthandler, glob, sysconfig, threading
import torch
from oomdoctor.sandbox.primitives import assemblers_error
faulthandler.dump_traceback_later(60, exit=True)
libraries = glob.glob(sysconfig.get_path("stdlib") + "/lib-dynload/*.so")
done = threading.Event()
def load():
    for library in libraries * 3:
        try:
            ctypes.PyDLL(library)
        except OSError:
            pass
    done.set()
threading.Thread(target=load).start()
while not done.is_set():
    assemblers_error()
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the library's symbols are read on Linux alone")
def test_its_place_is_read_while_another_thread_loads_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", WHILE_LOADING], check=True, capture_output=True, text=True)
    assert done.stdout == "done\n"
