"""``make docs``: brings the Chinese catalogue, ``oomdoctor/language/zh/``, in line with the texts of the modules.

A text that is new gets an empty translation, to be filled in, and a translation whose text is gone goes; the order is
that of ``docs/texts/``. ``--check`` writes nothing, names what is missing, stale or has other placeholders, and answers
1 then.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from oomdoctor.language.catalogue import HOLE, holes, read

ROOT: Final = Path(__file__).resolve().parents[1]
_TEXTS: Final = runpy.run_path(str(Path(__file__).with_name("texts_page.py")))
_PLAIN: Final = re.compile(r"[\w(][^:#`'\"\\\[\]{}]*(?<!\s)")
"""What YAML takes for a text as it is."""
_SIDE_BY_SIDE: Final = re.compile(rf"(?:{HOLE.pattern}){{2,}}")
_TITLE: Final = re.compile(r'^title = "(.*)"$', re.MULTILINE)
"""What a message of another library means, in ``oomdoctor/incident/wordings``."""
_LONG: Final = 100


def main(argv: list[str] | None = None) -> int:
    """Write the catalogue anew, or say what is wrong with it."""
    parser = argparse.ArgumentParser(prog="make docs", description="Bring the Chinese catalogue in line.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where something is wrong")
    args = parser.parse_args(argv)
    if args.check:
        wrong = [fault for room, texts in rooms().items() for fault in faults(room, texts)]
        print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
        return 1 if wrong else 0
    for room, texts in rooms().items():
        path = file_of(room)
        path.write_text(page(room, texts, dict(read(path)) if path.is_file() else {}), encoding="utf-8")
    return 0


def file_of(room: str) -> Path:
    """Return the file with the translations of a room."""
    return ROOT / "oomdoctor" / "language" / "zh" / f"{room}.yaml"


def rooms() -> dict[str, dict[str, list[str]]]:
    """Return the texts of each module of each room, each text once in a room."""
    found: dict[str, dict[str, list[str]]] = {}
    for room in sorted(path for path in (ROOT / "oomdoctor").iterdir() if path.is_dir()):
        seen: set[str] = set()
        for module in sorted([*room.rglob("*.py"), *room.rglob("*.toml")]):
            source = module.read_text(encoding="utf-8")
            found_in = _TITLE.findall(source) if module.suffix == ".toml" else _TEXTS["texts"](source)
            texts = dict.fromkeys(" ".join(text.split()) for text in found_in)
            if new := [text for text in texts if text not in seen]:
                found.setdefault(room.name, {})[module.relative_to(room).with_suffix("").as_posix()] = new
                seen.update(new)
    return found


def faults(room: str, texts: dict[str, list[str]]) -> Iterator[str]:
    """Yield what is wrong with the translations of a room, a line each."""
    path = file_of(room)
    there, name = dict(read(path)) if path.is_file() else {}, f"zh/{path.name}"
    wanted = {text for of_module in texts.values() for text in of_module}
    yield from (f"{name}: missing: {text}" for text in sorted(wanted) if not there.get(text))
    yield from (f"{name}: stale: {text}" for text in there if text not in wanted)
    yield from (f"{name}: {fault}" for english, said in there.items() if said for fault in disagreements(english, said))


def disagreements(english: str, said: str) -> Iterator[str]:
    """Yield how the placeholders of a translation differ from those of its text."""
    if english == said:
        return
    known, used = holes(english), HOLE.findall(said)
    if unknown := [hole for hole in used if hole not in known]:
        yield f"no such placeholder as {', '.join(unknown)}: {english}"
    if lost := {_name(hole) for hole in known} - {_name(hole) for hole in used}:
        yield f"without {', '.join(sorted(lost))}: {english}"
    for together in _SIDE_BY_SIDE.findall(english):
        if together not in said:
            yield f"{together} stand side by side, in this order: {english}"


def _name(hole: str) -> str:
    return hole.strip("{}").partition("#")[0]


def page(room: str, texts: dict[str, list[str]], said: dict[str, str]) -> str:
    """Return the file of a room."""
    lines = [f"# Texts of oomdoctor/{room} in Chinese, in the order of docs/texts/{room}.md."]
    for module, of_module in texts.items():
        lines += ["", f"# {module}", *(_entry(text, said.get(text, "")) for text in of_module)]
    return "\n".join([*lines, ""])


def _entry(english: str, said: str) -> str:
    if "\n" in said:
        block = "\n".join(f"  {line}".rstrip() for line in said.rstrip("\n").split("\n"))
        return f"? {_quoted(english)}\n: |\n{block}"
    between = "\n: " if len(english) > _LONG else ": "
    return f"{'? ' if len(english) > _LONG else ''}{_quoted(english)}{between}{_quoted(said)}"


def _quoted(text: str) -> str:
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in ("yes", "no", "on", "off", "true", "false", "null")
    return text if is_plain and not text[0].isdigit() else json.dumps(text, ensure_ascii=False)


if __name__ == "__main__":
    raise SystemExit(main())
