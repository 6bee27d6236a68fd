"""Kernels that skip their imports: each is a fork of a process that has made them.

A kernel that trains and runs out imports torch, its compiler and the libraries of the panel, which takes longer than
most of the tests. Run as a script, this is the process that has imported them and nothing of oomdoctor; it forks itself
for each kernel that ``start`` asks for. Where files of tests have processes of their own, they share it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

_READ_AT_IMPORT = ("CUDA_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTORCH_", "STUBCUDA_", "TORCH_")
"""What variables begin with that libraries read when they are loaded."""
_IMPORTED = (
    *("ipykernel.kernelapp", "ipykernel.zmqshell", "ipywidgets", "jinja2", "libcst", "pydantic", "rich.console"),
    *("rule_engine", "torch._dynamo", "torch._subclasses.fake_tensor", "torch.utils.checkpoint", "torch.utils.data"),
)
_PARENT = "--IPKernelApp.parent_handle"
"""A kernel ends when the process of this number does, and says less on its terminal."""
_LONGEST_S = 60
OWNER = "OOMDOCTOR_TESTS_OWNER"
"""Names the variable that tells the process of whose tests, in whichever process, the forks are."""


class Fork:
    """A kernel's process, which is no child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> None:
        """Wait until it is gone."""
        end = time.monotonic() + _LONGEST_S
        with suppress(ProcessLookupError):
            while time.monotonic() < end:
                os.kill(self.pid, 0)
                time.sleep(0.005)
            raise TimeoutError(f"process {self.pid} does not end")


class _Stock:
    """The process that has imported what kernels import."""

    def __init__(self, env: dict[str, str]) -> None:
        owner = os.environ.get(OWNER) or str(os.getpid())
        address = f"\0oomdoctor-kernels-{owner}"
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(address)
        except ConnectionRefusedError:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(address)
                server.listen()
                command = [sys.executable, __file__, str(server.fileno()), owner]
                subprocess.run(command, pass_fds=[server.fileno()], env=env, check=True)
            link.connect(address)
        self._lines = link.makefile("rw", encoding="utf-8")
        self._env = json.loads(self._lines.readline())

    def fork(self, argv: list[str], env: dict[str, str], cwd: str) -> Fork | None:
        """Return a fork that runs ``argv``; None where what it has imported has read other variables."""
        if _read_at_import(env) != self._env:
            return None
        print(json.dumps([argv, env, cwd]), file=self._lines, flush=True)
        return Fork(int(self._lines.readline()))


_stock: list[_Stock] = []


def start(argv: list[str], env: dict[str, str], cwd: str) -> Fork | subprocess.Popen[bytes]:
    """Start a kernel, ``argv`` being the options of ``python -m ipykernel_launcher``."""
    if not _stock:
        _stock.append(_Stock(env))
    forked = _stock[0].fork(argv, env, cwd)
    return forked or started(argv, env, cwd)


def started(argv: list[str], env: dict[str, str], cwd: str) -> subprocess.Popen[bytes]:
    """Start a kernel that makes its own imports."""
    command = [sys.executable, "-m", "ipykernel_launcher", *argv, f"{_PARENT}={os.getpid()}"]
    return subprocess.Popen(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, start_new_session=True)


def _read_at_import(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_IMPORT)}


def _serve(server: socket.socket, owner: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that end
    links: dict[socket.socket, TextIO] = {}
    while Path(f"/proc/{owner}").exists():
        for ready in select.select([server, *links], [], [], 1)[0]:
            if ready is server:
                link, _ = server.accept()
                links[link] = link.makefile("rw", encoding="utf-8")
                print(json.dumps(_read_at_import(dict(os.environ))), file=links[link], flush=True)
                continue
            line = links[ready].readline()
            if not line:
                links.pop(ready).close()
                ready.close()
                continue
            pid = os.fork()
            if not pid:
                for link, lines in links.items():
                    lines.close()
                    link.close()
                server.close()
                _become_kernel(*json.loads(line))
            print(pid, file=links[ready], flush=True)


def _become_kernel(argv: list[str], env: dict[str, Any], cwd: str) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["ipykernel_launcher", *argv, f"{_PARENT}={os.getppid()}"]
    # This folder comes first where a script was started, and what PYTHONPATH names before the rest.
    sys.path[:1] = env.get("PYTHONPATH", "").split(os.pathsep) if env.get("PYTHONPATH") else []
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()  # type: ignore[no-untyped-call]
    sys.exit()


if __name__ == "__main__":
    if os.fork():  # there are tests that count the children of their process
        os._exit(0)
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a kernel's collections pass over what was imported, and leave its pages shared
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
