"""Memory cgroups of one's own, with what is started in them; they are gone afterwards. They need root and cgroup v1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/memory")


def can_make_groups() -> bool:
    try:
        with group():
            return True
    except OSError:
        return False


@contextmanager
def group(limit: int | None = None, *, inner: str = "") -> Iterator[Path]:
    """A memory cgroup, with a group inside of it where that has a name; what still runs there in the end is killed."""
    folder = GROUPS / f"oomdoctor-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir()
    try:
        if limit is not None:
            (folder / "memory.limit_in_bytes").write_text(str(limit))
        (folder / inner).mkdir(exist_ok=True)
        yield folder / inner
    finally:
        for one in (folder / inner, folder) if inner else (folder,):
            _remove(one)


def _remove(folder: Path) -> None:
    """Remove a group, whose last process may not be gone yet."""
    for _ in range(200):
        with suppress(OSError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.05)
    folder.rmdir()


def kills(folder: Path) -> int:
    """Return how often the kernel has killed in a group."""
    return int((folder / "memory.oom_control").read_text().split()[-1])


def started_in(folder: Path, argv: list[str], env: dict[str, str], cwd: str) -> subprocess.Popen[bytes]:
    """Start a Jupyter kernel in a group."""
    command = ["sh", "-c", f'echo $$ > {folder}/cgroup.procs; exec "$0" "$@"', sys.executable]
    command += ["-m", "ipykernel_launcher", *argv, f"--IPKernelApp.parent_handle={os.getpid()}"]
    return subprocess.Popen(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, start_new_session=True)
