"""``oomdoctor rules``: what the rule base knows, and whether a rule of one's own is right."""

from __future__ import annotations

import argparse
import json
import linecache
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from oomdoctor import fixes
from oomdoctor.errors import UsageError
from oomdoctor.language import say
from oomdoctor.rulebook import everything, load, locate
from oomdoctor.rulebook.loading import files_in
from oomdoctor.views.labels import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from oomdoctor.rulebook.matching import Rule, RuleBook


_CODE: Final = frozenset({"Fires when", "Fixes", "See also", "Fires on", "Silent on", "References"})
"""Sections that are no sentences."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add(actions, "list", "name all rules")
    _add(actions, "show", "print one rule with its reasons").add_argument("id", metavar="ID")
    _add(actions, "check", "check rule files, their examples included").add_argument(
        "paths", metavar="PATH", type=Path, nargs="*", help="files or folders; the shipped rules by default"
    )


def _add(actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Do what was asked for; 1 where a checked rule has a fault."""
    book = everything((), fixes.ids())
    if args.action == "check":
        return _check([path.expanduser() for path in args.paths] or [locate()], book, as_json=args.json)
    if args.action == "show":
        rule = book.get(args.id)
        if args.json:
            print(json.dumps({**rule.file.model_dump(mode="json"), "path": rule.path}, indent=2))
        else:
            Console(highlight=False, soft_wrap=True).print(_story(rule))
    elif args.json:
        told = {"rules": [_brief(rule) for rule in book.rules], "faults": [asdict(fault) for fault in book.faults]}
        print(json.dumps(told, indent=2))
    else:
        _list(book)
    return 0


def _family(rule: Rule) -> str:
    return Path(rule.path).parent.name


def _brief(rule: Rule) -> dict[str, object]:
    file = rule.file
    return {
        "id": file.id,
        "family": _family(rule),
        "title": file.title,
        "cause": file.cause.value,
        "confidence": file.confidence,
        "fixes": list(file.fixes),
        "path": rule.path,
    }


def _list(book: RuleBook) -> None:
    for rule in sorted(book.rules, key=lambda rule: (_family(rule), -rule.file.confidence, rule.file.id)):
        print(f"{rule.file.id:<36} {rule.file.confidence:4.0%}  {rule.file.cause.value:<20} {say(rule.file.title)}")
    for fault in book.faults:
        Console(highlight=False).print(Text(say(f"left out: {fault}"), "red"), soft_wrap=True)


def _story(rule: Rule) -> RenderableType:
    file = rule.file
    about = f"cause {file.cause.value}, confidence {file.confidence:.0%}, since {file.since}, {rule.path}"
    parts = [Text.assemble((file.id, "bold"), f"  {say(file.title)}"), Text(about, "dim")]
    for name, text in _sections(rule):
        parts.append(
            Text.assemble("\n", (say(name), "bold"), "\n", text.strip() if name in _CODE else say(text.strip()))
        )
    return Group(*parts)


def _sections(rule: Rule) -> Iterator[tuple[str, str]]:
    file = rule.file
    yield "What it looks at", file.what
    yield "Why it fills memory", file.why
    yield "Fires when", "\nor ".join(match.strip() for match in file.match)
    yield "Says", "\n".join(file.because)
    yield "May be wrong", file.false_positives
    yield "Fixes", ", ".join(file.fixes) or "none that oomdoctor applies"
    if file.see:
        yield "See also", ", ".join(file.see)
    yield "Fires on", "\n".join(map(_facts, file.examples.fires))
    yield "Silent on", "\n".join(map(_facts, file.examples.silent))
    yield "References", "\n".join(file.references) or "none"


def _facts(example: dict[str, dict[str, object]]) -> str:
    """Return an example as ``census.found 4GiB, code.reruns 1``."""
    return ", ".join(
        f"{group}.{name} {value if isinstance(value, str) and ' ' not in value else json.dumps(value)}"
        for group, names in example.items()
        for name, value in names.items()
    )


def _check(paths: Sequence[Path], book: RuleBook, *, as_json: bool) -> int:
    for path in paths:
        if not path.exists():
            raise UsageError(f"cannot read {path}: there is no such file or folder")
    if not any(files_in(paths, [])) and all(os.access(path, os.R_OK) for path in paths):
        raise UsageError(f"there are no rule files in {', '.join(map(str, paths))}")
    places = [path.resolve() for path in paths]
    others = {
        rule.file.id
        for rule in book.rules
        if not any(Path(rule.path).resolve().is_relative_to(place) for place in places)
    }
    checked = load(paths, fixes.ids(), others)
    if as_json:
        print(json.dumps({"rules": len(checked.rules), "faults": list(map(asdict, checked.faults))}, indent=2))
    else:
        _tell(checked)
    return 1 if checked.faults else 0


def _tell(checked: RuleBook) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for fault in checked.faults:
        console.print(Text.assemble((f"{fault.path}:{fault.line}", "bold"), f": {say(fault.message)}"))
        if console.is_terminal and (line := linecache.getline(fault.path, fault.line).strip()):
            console.print(Text(f"    {line}", "dim"))
    sound = count(len(checked.rules), "rule")
    if not checked.faults:
        console.print(say(f"{sound}, no faults"))
        return
    files = count(len({fault.path for fault in checked.faults}), "file")
    console.print(say(f"{count(len(checked.faults), 'fault')} in {files}; {sound} without"))
