"""``make docs``: writes ``docs/rules.md``, one page of all rules, from the rule files.

``--check`` writes nothing and answers 1 where the page is not what the files say. A rule is described where it is
defined; the page is for reading and for links.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

from oomdoctor import fixes
from oomdoctor.rulebook import load, locate
from oomdoctor.rulebook.matching import Rule

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "rules.md"

_FAMILIES: Final = {
    "leaks": "Memory that is held and should not be",
    "activations": "Activations, batches and single tensors",
    "model": "Models and checkpoints",
    "optimizer": "Gradients and optimizer state",
    "device": "The device, its pool and its neighbours",
    "distributed": "Several devices and ranks",
    "frameworks": "Other frameworks in the same process",
    "host": "Host memory, workers and limits",
    "advice": "Advice that no fix applies",
}
"""Headings of the page by folder, in their order; a folder that is not here comes last under its own name."""

_HEAD: Final = """\
# The rules

<!-- Written by `make docs` from the files in rules/. Change those, not this page. -->

What oomdoctor knows about running out of memory: {count} rules in {families} families, each a file below
[`rules/`](../rules). A rule fires on what was measured and on what the code does; the words of the message alone count
for little, because PyTorch prints some of its hints always. *Confidence* is its author's estimate of how often the
cause is right when it fires, and sorts the findings. A fact that is not known makes an expression false. In a shell,
`oomdoctor rules show ID` prints the same, with the examples on which a rule must fire and must stay silent.

Rules of your own: a folder in `c.OomDoctor.rule_paths`. `oomdoctor rules check PATH` names every fault in them with its
line.

"""


def main(argv: list[str] | None = None) -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(prog="make docs", description="Write docs/rules.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the page is out of date")
    args = parser.parse_args(argv)
    text = page(load([locate()], known_fixes=fixes.ids()).rules)
    if args.check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is out of date: make docs", file=sys.stderr)
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def page(rules: tuple[Rule, ...]) -> str:
    """Return the page in Markdown."""
    known = list(_FAMILIES)

    def order(rule: Rule) -> tuple[int, str, float, str]:
        family = _family(rule)
        at = known.index(family) if family in known else len(known)
        return at, family, -rule.file.confidence, rule.file.id

    families = [(name, list(group)) for name, group in groupby(sorted(rules, key=order), key=_family)]
    parts = [_HEAD.format(count=len(rules), families=len(families))]
    parts += [f"- [{_heading(name)}](#{_anchor(_heading(name))}) ({len(group)})\n" for name, group in families]
    for name, group in families:
        parts += [f"\n## {_heading(name)}\n\n", *_table(group), *(_section(rule) for rule in group)]
    return "".join(parts)


def _family(rule: Rule) -> str:
    return Path(rule.path).parent.name


def _heading(family: str) -> str:
    return _FAMILIES.get(family, family)


def _anchor(heading: str) -> str:
    """Return what GitHub makes of a heading in an address."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _table(rules: list[Rule]) -> Iterator[str]:
    yield "| rule | what it says | cause | confidence |\n| --- | --- | --- | --- |\n"
    for rule in rules:
        file = rule.file
        yield f"| [`{file.id}`](#{file.id}) | {_cell(file.title)} | {file.cause.value} | {file.confidence:.0%} |\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _section(rule: Rule) -> str:
    file = rule.file
    source = f"../{Path(rule.path).relative_to(locate().parent).as_posix()}"
    lines = [
        f"\n### {file.id}\n",
        f"**{file.title}.** {_one_line(file.what)}",
        f"*Why.* {_one_line(file.why)}",
        "*Fires when*\n\n```\n" + "\nor ".join(map(_one_line, file.match)) + "\n```",
        "*Says*\n\n" + "\n".join(f"- {sentence}" for sentence in map(_sentence, file.because)),
        f"*May be wrong.* {_one_line(file.false_positives)}",
        f"*Cause* {file.cause.value} · *confidence* {file.confidence:.0%} · *since* {file.since} · [source]({source})",
        "*Fixes* " + (", ".join(f"`{fix}`" for fix in file.fixes) or "none that oomdoctor applies"),
        *(["*See also* " + ", ".join(f"[`{other}`](#{other})" for other in file.see)] if file.see else []),
        "*References* " + (", ".join(f"<{address}>" for address in file.references) or "none"),
    ]
    return "\n\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _sentence(text: str) -> str:
    """Return a sentence with its placeholders as code, which Markdown prints as they are."""
    return re.sub(r"(?<!`)\{[^}]*\}(?!`)", lambda found: f"`{found[0]}`", _one_line(text))


if __name__ == "__main__":
    sys.exit(main())
