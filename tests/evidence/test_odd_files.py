"""Files under ``/proc`` and ``/sys`` that are damaged, odd or gone: a reason in the place of a figure, never an error.

Every file of a recorded machine is damaged in every way in turn; then many at once, by chance and always alike.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import psutil
import pytest
from trees import GIB, MEMINFO, MIB, PRESSURE, mount, of, plant, v1_group, v2_group

from oomdoctor.evidence import _kernel, _processes, host
from oomdoctor.model.memory import HostMemory, Pressure
from oomdoctor.model.sizes import format_size
from oomdoctor.model.unavailable import Unavailable

MACHINE = {
    "proc/meminfo": MEMINFO,
    "proc/pressure/memory": PRESSURE,
    "proc/sys/vm/overcommit_memory": "0\n",
    "proc/sys/vm/max_map_count": "65530\n",
    "proc/self/maps": "first\nsecond\n",
    "proc/self/status": "Name:\tpython\nVmHWM:\t    2048 kB\nVmData:\t    1024 kB\n",
}
PSI = {"memory.pressure": PRESSURE}
V2 = (of("0::/a/b\n", mount("cgroup2", "/", "/sys/fs/cgroup")), "sys/fs/cgroup")
V1 = (of("3:memory:/a/b\n", mount("cgroup", "/", "/sys/fs/cgroup/memory", "rw,memory")), "sys/fs/cgroup/memory")
FILES = sorted({*MACHINE, "proc/self/cgroup", "proc/self/mountinfo"})
OF_GROUPS = {1: sorted(v1_group(GIB, GIB)), 2: sorted({**v2_group(GIB, GIB), **PSI})}


def machine(root: Path, version: int) -> Path:
    """Plant a whole machine of that cgroup version; the group ``b`` of this process is below ``a``."""
    where, top = V1 if version == 1 else V2
    make: Callable[..., dict[str, str]] = v1_group if version == 1 else v2_group
    psi = PSI if version == 2 else {}
    groups = {f"{top}/a": make(8 * GIB, 2 * GIB) | psi, f"{top}/a/b": make(4 * GIB, 3 * GIB) | psi}
    return plant(root, MACHINE | where, groups)


def everything(root: Path) -> HostMemory:
    """Read all that there is, and see that each is a figure that can be, or says why it is none."""
    found = host.read(root, in_full=False)
    figures = {field.name: getattr(found, field.name) for field in fields(HostMemory)}
    figures |= {"maps": host.maps(root), "pressure of all": host.pressure(root)}
    group = _kernel.cgroup(root)
    figures |= {f"group's {name}": value for name, value in group.figures().items()}
    for name, value in figures.items():
        if isinstance(value, Pressure):
            assert 0 <= value.some <= 1, name
            assert 0 <= value.full <= 1, name
        elif isinstance(value, Unavailable):
            assert value.reason, name
        else:
            assert type(value) is int, name
            assert 0 <= value < 1 << 66, name
            assert format_size(value)
    capacity, free, which = host.binding_limit(found)
    assert 0 <= free <= capacity, which
    return found


def _numbers(text: str, by: str) -> bytes:
    return re.sub(r"(?<![\w.])\d+(\.\d+)?(?![\w.])", by, text).encode()


SPOIL: dict[str, Callable[[str], bytes]] = {
    "empty": lambda _: b"",
    "one space": lambda _: b" ",
    "garbage": lambda _: b"garbage\n",
    "a line of separators": lambda _: b": :: - - :\n\n - \n::\n",
    "binary": lambda _: bytes(range(256)) * 3,
    "zeros": lambda text: bytes(len(text)),
    "NULs inside": lambda text: text.replace("/", "/\0").replace(" 1", "\0 1").encode(),
    "negative": lambda text: _numbers(text, r"-\g<0>"),
    "thousands of digits": lambda text: _numbers(text, "9" * 5000),
    "more than the kernel counts": lambda text: _numbers(text, str(1 << 64)),
    "fractions": lambda text: _numbers(text, "1.5.2"),
    "underscores": lambda text: _numbers(text, "1_000"),
    "other digits": lambda text: _numbers(text, "\u0661\u00b2"),
    "no number": lambda text: _numbers(text, "nan"),
    "half": lambda text: text[: len(text) // 2].encode(),
    "without spaces": lambda text: text.replace(" ", "").encode(),
    "long names": lambda text: text.replace("/a", "/" + "a" * 300).replace("cgroup ", "c" * 300 + " ").encode(),
    "a path upwards": lambda text: text.replace("/a/b", "/a/../../../b").replace("/sys", "/../../sys").encode(),
    "half a character": lambda text: text.encode() + b"\xff\xc3",
}


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _circle(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _sparse(path: Path) -> None:
    os.truncate(path, 1 << 40)


REPLACE: dict[str, Callable[[Path], None]] = {
    "gone": Path.unlink,
    "a folder": _folder,
    "a link in a circle": _circle,
    "a terabyte of zeros": _sparse,
}


def _spoilt(root: Path, version: int) -> Iterator[Path]:
    _, top = V1 if version == 1 else V2
    yield from (root / name for name in FILES)
    yield from (root / top / folder / name for folder in ("a", "a/b") for name in OF_GROUPS[version])


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("damage", [*SPOIL, *REPLACE])
def test_a_damaged_file_is_a_reason(tmp_path: Path, version: int, damage: str) -> None:
    root = machine(tmp_path, version)
    sound = everything(root)
    assert sound.cgroup_limit == 4 * GIB
    # The mappings of a process are counted to the end, however many there are.
    unbounded = {root / "proc/self/maps"} if damage == "a terabyte of zeros" else set()
    for path in sorted({*_spoilt(root, version)} - unbounded):
        text = path.read_text()
        if damage in SPOIL:
            path.write_bytes(SPOIL[damage](text))
        else:
            REPLACE[damage](path)
        everything(root)
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_text(text)
    assert everything(root).cgroup_used == sound.cgroup_used


@pytest.mark.parametrize("version", [1, 2])
def test_files_damaged_by_chance(tmp_path: Path, version: int) -> None:
    chance = random.Random(7)
    root = machine(tmp_path, version)
    texts = {path: path.read_bytes() for path in _spoilt(root, version)}
    for _ in range(150):
        chosen = chance.sample(list(texts), 4)
        for path in chosen:
            spoilt = bytearray(texts[path])
            for _ in range(chance.randint(1, 6)):
                at = chance.randrange(len(spoilt) + 1)
                put = chance.choice((b"", b"\0", b"-", b" ", b"9" * 30, b":", b"\n"))
                spoilt[at : at + chance.choice((0, 1, 7))] = put
            path.write_bytes(bytes(spoilt))
        everything(root)
        for path in chosen:
            path.write_bytes(texts[path])


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_that_vanishes_while_it_is_read(tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = _kernel.text, 0

    def text(path: Path) -> str | Unavailable:
        nonlocal left
        left -= 1
        if left == 0:
            shutil.rmtree(tmp_path / "sys")
        return real(path)

    monkeypatch.setattr(_kernel, "text", text)
    reads = 0
    for at in range(1, 60):
        machine(tmp_path, version)
        left = at
        everything(tmp_path)
        reads += left <= 0
    assert 10 < reads < 59


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Run the body without the rights of root, who may read what is forbidden."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_path(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody may enter by all folders above it."""
    closed = [folder for folder in (tmp_path, *tmp_path.parents) if not folder.stat().st_mode & 0o001]
    modes = {folder: folder.stat().st_mode for folder in closed}
    for folder in closed:
        folder.chmod(0o711)
    yield tmp_path
    for folder, mode in modes.items():
        folder.chmod(mode)


@pytest.mark.parametrize("version", [1, 2])
def test_what_may_not_be_read_is_not_taken_for_no_limit(open_path: Path, version: int) -> None:
    root = machine(open_path, version)
    _, top = V1 if version == 1 else V2
    for path in _spoilt(root, version):
        path.chmod(0)
        with _as_nobody():
            everything(root)
        path.chmod(0o644)
    forbidden = root / top / "a"
    forbidden.chmod(0)
    with _as_nobody():
        found = everything(root)
    forbidden.chmod(0o755)
    assert isinstance(found.cgroup_limit, Unavailable)
    assert "Permission denied" in found.cgroup_limit.reason
    assert isinstance(found.cgroup_used, Unavailable)
    with _as_nobody():
        assert everything(root).cgroup_limit == 4 * GIB


@pytest.mark.parametrize("damage", ["garbage", "negative", "empty"])
def test_a_limit_that_is_no_number_is_not_taken_for_no_limit(tmp_path: Path, damage: str) -> None:
    root = machine(tmp_path, 2)
    for folder in ("a", "a/b"):
        path = root / "sys/fs/cgroup" / folder / "memory.max"
        path.write_bytes(SPOIL[damage](path.read_text()))
    found = _kernel.cgroup(root)
    assert isinstance(found.limit, Unavailable)
    assert "memory.max holds no number" in found.limit.reason
    assert found.used == 3 * GIB


def test_a_damaged_line_hides_nothing_but_itself(tmp_path: Path) -> None:
    root = machine(tmp_path, 2)
    meminfo = root / "proc/meminfo"
    meminfo.write_text(MEMINFO.replace("MemAvailable:    9000000 kB", "MemAvailable:    -9 kB"))
    for name in ("cgroup", "mountinfo"):
        path = root / "proc/self" / name
        path.write_text(f"garbage\n{path.read_text()}:\n - cgroup2\n")
    found = everything(root)
    assert found.available == Unavailable(f"{meminfo} holds no number for MemAvailable")
    assert (found.total, found.cgroup_limit) == (16384000 << 10, 4 * GIB)


def test_a_list_of_groups_in_another_form_is_not_taken_for_none(tmp_path: Path) -> None:
    root = machine(tmp_path, 2)
    (root / "proc/self/cgroup").write_text("memory /a\n")
    assert "another form" in _kernel.cgroup(root).limit.reason  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "error", [psutil.NoSuchProcess(1), FileNotFoundError(2, "gone"), ValueError("odd"), IndexError()], ids=repr
)
@pytest.mark.parametrize("where", ["__init__", "memory_info", "memory_full_info", "children"])
def test_processes_that_cannot_be_read_are_a_reason(
    error: Exception, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(psutil.Process, where, fail)
    found = _processes.read()
    wants = {"__init__": "rss", "memory_info": "rss", "memory_full_info": "uss", "children": "children"}[where]
    value = getattr(found, wants)
    assert isinstance(value, Unavailable)
    assert value.reason
    assert isinstance(_processes.read(in_full=False).rss, Unavailable) == (wants == "rss")
    assert isinstance(found.rss, Unavailable) or found.rss > MIB
