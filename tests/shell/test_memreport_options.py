"""The options of ``%memreport``: what cannot be used is refused with one short line, and nothing is changed for it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernels import Kernel

from oomdoctor.errors import UsageError
from oomdoctor.shell.memreport import read_options
from oomdoctor.shell.verbs import VERBS

LONG = "n" * 300
DIGITS = "9" * 5000
REFUSED = {
    "--top=": "--top needs a number above zero",
    "--top": "--top needs a number above zero",
    "--top --diff": "--top needs a number above zero",
    f"--top {DIGITS}": "--top takes a number of 9 digits at most, not one of 5,000",
    f"--top -{DIGITS}": "--top needs a number above zero, not '-999",
    f"--top {'0' * 5000}": "--top needs a number above zero, not '000",
    "--top 1.5": "--top needs a number above zero, not '1.5'",
    "--top \u0663": "--top needs a number above zero, not '\u0663'",
    "--top \u00b2": "--top needs a number above zero, not '\u00b2'",
    "--json ~nouser/x": "~nouser/x cannot be written: there is no home folder of that name",
    "--html ~nouser/x": "~nouser/x cannot be written: there is no home folder of that name",
    "--snapshot ~nouser/x": "~nouser/x cannot be written: there is no home folder of that name",
    "--json 'a\0b'": r"a\x00b cannot be written: embedded null byte",
    "--html 'a\0b'": r"a\x00b cannot be written: embedded null byte",
    "--snapshot 'a\0b'": r"a\x00b cannot be written: embedded null byte",
    "--json 'a\ud800b'": r"a\ud800b cannot be written: ",
    f"--json {LONG}": "cannot be written: File name too long",
    f"--html {LONG}": "cannot be written: File name too long",
    f"--snapshot {LONG}/x": "cannot be written: File name too long",
    f"--html {'d/' * 3000}x": "cannot be written: ",
    "--json .": ". cannot be written: Is a directory",
    "--html folder": "folder cannot be written: Is a directory",
    "--snapshot missing/x": "missing/x cannot be written: No such file or directory (there is no folder missing)",
    "--json file/x": "file/x cannot be written: Not a directory",
    "--json circle": "circle cannot be written: ",
    "--html ''": "--html needs a path",
    "--json ''": "--json needs a path",
    "--json=": "--json needs a path after =",
    "--json new/": "new/ cannot be written: it ends like a folder, and there is none",
    "--json folder/": "folder cannot be written: Is a directory",
    "--html -": "- is no file: only --json is printed, where it has no path",
    "--snapshot -": "- is no file: only --json is printed",
    "--html /dev/stdout": "/dev/stdout is no file: only --json is printed",
    "--json /dev/stderr": "/dev/stderr is no file: only --json is printed",
    "--json /proc/self/fd/2": "/proc/self/fd/2 is no file: only --json is printed",
    "--json one --json two": "--json is given twice",
    "--json one --json": "--json is given twice",
    "--top 3 --top=4": "--top is given twice",
    "--device cpu --device cuda": "--device is given twice",
    "--diff --diff": "--diff is given twice",
    "--device ''": "--device needs a name",
    "--device": "--device needs a name",
    f"--{LONG}": "%memreport does not take '--nnn",
    "--to 3": "%memreport does not take '--to': it takes --device, --top",
    "-t": "%memreport does not take '-t'",
    "--": "%memreport does not take '--'",
    f"{DIGITS}": "%memreport does not take '999",
    "'a\x1b[31m\nb'": r"%memreport does not take 'a\x1b[31m\nb'",
    "--diff --diff=1": "--diff takes no value",
    "--json new --html ./new": "each file needs a path of its own",
    "--json file --html to_file": "each file needs a path of its own",
    "--json new --html missing/x": "there is no folder missing",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with one of everything in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "to_file").symlink_to("file")
    (tmp_path / "to_nothing").symlink_to("nothing")
    (tmp_path / "circle").symlink_to("circle")
    return tmp_path


def _tree(folder: Path) -> list[tuple[str, int, int]]:
    found = ((path, path.lstat()) for path in folder.rglob("*"))
    return sorted((str(path), status.st_mode, status.st_size) for path, status in found)


def _refusal(words: list[str]) -> str:
    with pytest.raises(UsageError) as refused:
        read_options(words)
    return str(refused.value)


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: ascii(words)[:40])
def test_what_cannot_be_used_is_refused_with_one_short_line(folder: Path, words: str) -> None:
    before = _tree(folder)
    says = _refusal(shlex.split(words))
    assert REFUSED[words] in says
    assert len(says) < 300
    assert says.isprintable()
    assert _tree(folder) == before


def test_what_may_not_be_written_is_refused(folder: Path) -> None:
    closed, locked = folder / "closed", folder / "locked"
    closed.mkdir(mode=0o700)
    locked.write_text("kept")
    locked.chmod(0o400)
    outer = [one for one in (folder, *folder.parents) if not one.stat().st_mode & 0o001]
    modes = {one: one.stat().st_mode for one in outer}
    for one in outer:
        one.chmod(0o711)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    else:
        closed.chmod(0)
    try:
        says = [_refusal(["--html", name]) for name in ("closed/x", "closed/x/y", "locked")]
    finally:
        if is_root:
            os.seteuid(0)
        for one, mode in modes.items():
            one.chmod(mode)
        closed.chmod(0o700)
    assert [one.partition(" cannot be written: ")[2] for one in says] == ["Permission denied"] * len(says)
    assert list(closed.iterdir()) == []
    assert locked.read_text() == "kept"


def test_what_can_be_used_is_read_and_leaves_no_trace(folder: Path) -> None:
    before = _tree(folder)
    found = read_options(shlex.split("--top 0012 --device cuda --diff --json to_nothing --html=new --snapshot file"))
    assert (found.top, found.device, found.diff, found.prints_json) == (12, "cuda", True, False)
    assert list(map(str, found.paths)) == ["to_nothing", "new", "file"]
    assert _tree(folder) == before, "a link that leads to nothing stays, and so does the nothing"
    assert read_options(["--top", "999999999"]).top == 999999999
    assert read_options(["--json"]).prints_json


@pytest.mark.parametrize("output", ["-", "/dev/stdout", "/dev/fd/1"])
def test_json_for_the_output_is_printed_and_opens_no_file(folder: Path, output: str) -> None:
    before = _tree(folder)
    found = read_options(["--json", output, "--html", "page.html"])
    assert found.prints_json
    assert list(map(str, found.paths)) == ["page.html"]
    assert _tree(folder) == before


def test_names_as_people_type_them_are_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    words = shlex.split('--json "folder/it\'s a name.json" --html ~/page.html --snapshot ./-')
    found = read_options(words)
    assert list(map(str, found.paths)) == ["folder/it's a name.json", str(folder / "page.html"), "-"]


# In a kernel ----------------------------------------------------------------------------------------------------

TYPED = {
    f"%memreport --top {DIGITS}": "--top takes a number of 9 digits at most",
    "%memreport --json ~nouser/x": "there is no home folder of that name",
    f"%memreport --html {LONG}": "File name too long",
    "get_ipython().run_line_magic('memreport', '--json a\\0b')": "embedded null byte",
    f"%memreport --device {LONG}": "is in use: there is cpu",
    "%memreport --device 'c\\x1b'": "is in use: there is cpu",
    f"%memreport '{LONG}": "cannot be read: No closing quotation",
    f"%oomdoctor {LONG}": "there is no verb 'nnn",
    f"%oomdoctor status {LONG}": "status does not take 'nnn",
    f"%oomdoctor auto {LONG}": "auto takes one of off, exact, any, not 'nnn",
    f"%oomdoctor fix {DIGITS}": "no cell that ran out of memory was diagnosed so far",
}


@pytest.fixture(scope="module")
def loaded() -> Iterator[Kernel]:
    kernel = Kernel()
    kernel.run("%load_ext oomdoctor", ok=True)
    yield kernel
    kernel.stop()


@pytest.mark.parametrize("typed", TYPED, ids=lambda typed: typed[:40])
def test_one_line_in_a_kernel(loaded: Kernel, typed: str) -> None:
    files = "sorted(__import__('os').listdir('.'))"
    before = loaded.value(files)
    reply = loaded.run(typed, ok=True)
    assert TYPED[typed] in reply.stderr
    assert reply.stderr.count("\n") == 1
    assert len(reply.stderr) < 500
    assert reply.text.strip() == reply.stderr.strip()
    assert loaded.value(files) == before


def test_a_number_of_thousands_of_digits_is_no_fix(loaded: Kernel) -> None:
    loaded.run("import torch\n%config OomDoctor.forecast_time_s = 0\n%oomdoctor simulate 64MiB", ok=True)
    loaded.run("torch.ones(1 << 26)", ok=False)
    for verb in ("fix", "diff"):
        reply = loaded.run(f"%oomdoctor {verb} {DIGITS}", ok=True)
        assert "there is no fix '999" in reply.stderr
        assert reply.stderr.count("\n") == 1
        assert len(reply.stderr) < 500
    loaded.run("%oomdoctor simulate off", ok=True)


def test_the_help_has_every_verb(loaded: Kernel) -> None:
    shown = loaded.run("%oomdoctor help", ok=True).stdout
    assert all(f"`%oomdoctor {verb}" in shown for verb in VERBS)
    assert "    " not in shown
