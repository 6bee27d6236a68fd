"""Rule files among whatever else lies in a folder: nothing is waited for, read without end or read twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_loading import GOOD

from oomdoctor import fixes
from oomdoctor.rulebook import everything, load, locate
from oomdoctor.rulebook.loading import files_in


def told(*paths: Path) -> list[tuple[str, int, str]]:
    faults = load(paths, known_fixes=None).faults
    assert all("\n" not in str(fault) for fault in faults)
    return [(Path(fault.path).name, fault.line, fault.message) for fault in faults]


def rule(folder: Path, name: str = "too_big", suffix: str = ".yaml") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / (name + suffix)
    path.write_text(GOOD.replace("too_big", name))
    return path


def test_pipes_and_devices_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "endless.yaml").symlink_to("/dev/zero")
    message = "this is not a plain file"
    assert told(tmp_path) == [("endless.yaml", 1, message), ("pipe.yaml", 1, message)]


def test_links_in_circles_and_to_nothing_are_faults_and_no_more(tmp_path: Path) -> None:
    rule(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "itself.yaml").symlink_to("itself.yaml")
    (tmp_path / "gone.yaml").symlink_to("nowhere")
    names = [name for name, _, message in told(tmp_path) if message.startswith("the file cannot be read: ")]
    assert names == ["gone.yaml", "itself.yaml"]
    assert len(load([tmp_path], known_fixes=None).rules) == 1


def test_a_rule_that_several_ways_lead_to_is_one_rule(tmp_path: Path) -> None:
    path = rule(tmp_path / "rules")
    (tmp_path / "other").symlink_to(tmp_path / "rules")
    (tmp_path / "rules" / "link.yml").symlink_to(path)
    ways = [tmp_path / "rules", path, tmp_path / "other", tmp_path / "rules" / ".." / "rules"]
    book = load([path, *ways], known_fixes=None)
    assert ([found.path for found in book.rules], book.faults) == ([str(path)], ())


def test_the_shipped_folder_named_once_more_takes_no_rule_away() -> None:
    book = everything([locate()], fixes.ids())
    assert {rule.id for rule in book.rules} == {path.stem for path in files_in([locate()], [])}
    assert book.faults == ()


def test_a_rule_of_the_users_does_not_replace_one_of_ours(tmp_path: Path) -> None:
    path = rule(tmp_path, "fragmentation")
    book = everything([tmp_path], None)
    assert book.get("fragmentation").path.startswith(str(locate()))
    assert [(fault.path, fault.line) for fault in book.faults] == [(str(path), 1)]


def test_copies_that_an_editor_keeps_are_passed_over(tmp_path: Path) -> None:
    rule(tmp_path)
    rule(tmp_path / ".ipynb_checkpoints", "too_big-checkpoint")
    rule(tmp_path, ".too_big")
    (tmp_path / "folder.yaml").mkdir()
    rule(tmp_path, "loud", ".YAML")
    book = load([tmp_path], known_fixes=None)
    assert ([found.id for found in book.rules], book.faults) == (["loud", "too_big"], ())


@pytest.mark.parametrize("name", ["a\0b", "~nobody-of-that-name/rules", "x" * 5000, "nowhere"])
def test_a_folder_that_cannot_be_is_one_fault(name: str) -> None:
    (fault,) = everything([Path(name)], None).faults
    assert fault.line == 1
    assert len(everything([Path(name)], None).rules) >= 50


def test_a_folder_that_may_not_be_read_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule(tmp_path)
    rule(tmp_path / "closed", "hidden")
    listed = os.scandir

    def refuses(path: str) -> object:  # root, as which tests may run, is refused nothing
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuses)
    assert told(tmp_path) == [("closed", 1, "the folder cannot be read: Permission denied")]
    assert len(load([tmp_path], known_fixes=None).rules) == 1


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"", 1, "a mapping of keys"),
        (b"# nothing\n", 1, "a mapping of keys"),
        (b"id: x\nwhy: \xfc\n", 1, "line 2 has the byte 0xfc"),
        (b"id: x\nwhy: a\0b\n", 2, "cannot be printed"),
        (b"id: x\nsince: 2020-13-45\n", 1, "month must be in 1..12"),
        (b"id: x\nsince: !!timestamp x\n", 1, "not YAML"),
        (b"id: x\nconfidence: 1" + b"0" * 5000, 1, "4300 digits"),
        (b"id: x\nx: " + b"[" * 5000 + b"\n", 2, "nest"),
        (b"[" * 100_000, 1, "nest"),  # libyaml may be the first to find that
        (b"{a: " * 50_000, 1, "nested more than 20 levels deep"),
        (b"- " * 100_000, 1, "nested more than 20 levels deep"),
        (b"".join(b" " * at + b"a:\n" for at in range(700)), 21, "nested more than 20 levels deep"),
        (b"#" * (300 << 10), 1, "at most 256 KiB"),
    ],
)
def test_what_is_no_rule_is_told_in_one_line(tmp_path: Path, content: bytes, line: int, words: str) -> None:
    (tmp_path / "x.yaml").write_bytes(content)
    assert [found for found in told(tmp_path) if found[1] == line and words in found[2]]


def test_a_file_that_unfolds_to_billions_of_values_is_read_at_once(tmp_path: Path) -> None:
    layers = [f"{chr(98 + at)}: &{chr(98 + at)} [{','.join([f'*{chr(97 + at)}'] * 9)}]" for at in range(12)]
    (tmp_path / "x.yaml").write_text("\n".join(["a: &a [x,x,x,x,x,x,x,x,x]", *layers, "match: *m", "because: *m"]))
    assert told(tmp_path)
