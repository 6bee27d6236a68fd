"""The first report of a process, for which modules of ours are imported, asks modes of the user's nothing either."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import oomdoctor

asked = []


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        asked.append(str(func))
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        asked.append(str(func))
        return func(*args, **(kwargs or {}))


model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
frozen = torch.jit.freeze(torch.jit.script(torch.nn.Linear(8, 8).eval()))
loss = model(torch.ones(4, 8)).sum()
node, array, storage = loss.grad_fn, torch.ones(9).numpy(), torch.ones(9).untyped_storage()
try:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
except torch.OutOfMemoryError as exc:
    error = exc
with Dispatch(), Function():
    DO
    print(asked)
    torch.ones(8).add(1)
    assert asked
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("do", ["print(len(str(oomdoctor.report(globals()))) > 100)", "oomdoctor.explain(error)"])
def test_the_first_report_under_modes_of_the_users_asks_them_nothing(do: str) -> None:
    code = PROGRAM.replace("DO", do)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stdout + done.stderr
