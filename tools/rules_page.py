"""``make docs``: writes ``docs/rules.md``, one page of all rules, from the rule files.

``--check`` writes nothing and answers 1 where the page is not what the files say. A rule is described where it is
defined; the page is for reading and for links. The site has a page of each rule instead (``one``), below its table of
all (``index``): ``tools/site_pages.py`` asks for both.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Final

import yaml

from oomdoctor import fixes
from oomdoctor.rulebook import load, locate
from oomdoctor.rulebook.facts import complete
from oomdoctor.rulebook.matching import Rule
from oomdoctor.rulebook.schema import facts_in

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
    families = _families(rules)
    parts = [_top(rules)]
    for name, group in families:
        parts += [f"\n## {_heading(name)}\n\n", *_table(group, "#{}"), *(_section(rule) for rule in group)]
    return "".join(parts)


def index(rules: tuple[Rule, ...]) -> str:
    """Return the site's table of all rules in Markdown, each with a link to its page."""
    parts = [_top(rules)]
    for name, group in _families(rules):
        parts += [f"\n## {_heading(name)}\n\n", *_table(group, "rules/{}.md")]
    return "".join(parts)


def one(rule: Rule, rules: tuple[Rule, ...]) -> str:
    """Return the site's page of one rule in Markdown; it lies in ``rules/``, beside ``fixes/``."""
    file = rule.file
    titles = {other.file.id: other.file.title for other in rules}
    remedies = [f"- [{fixes.title(fix)}](../fixes/{fix}.md): `%oomdoctor fix {fix}`" for fix in file.fixes]
    by_hand = "oomdoctor applies nothing here: the change is yours to make. *Why* above says where to look."
    said = rule.finding(complete(facts_in(file.examples.fires[0]))).because
    family = f"[{_heading(_family(rule))}](../rules.md#{_anchor(_heading(_family(rule)))})"
    example = f"It fires on these facts:\n\n```yaml\n{_facts(file.examples.fires[0])}```"
    example += "\n\nand then says:\n\n" + "\n".join(f"- {sentence}" for sentence in said) if said else ""
    see = [f"- [{titles[other]}]({other}.md)" for other in file.see]
    references = "\n".join(f"- <{address}>" for address in file.references)
    folded = "\n".join(f"    {line}" for line in "\nor ".join(map(_one_line, file.match)).splitlines())
    lines = [
        f"# {file.title}",
        f"`{file.id}` · cause `{file.cause.value}` · confidence {file.confidence:.0%} · since {file.since} · {family}",
        f"## What\n\n{_one_line(file.what)}",
        f"## Why\n\n{_one_line(file.why)}",
        "## What to do\n\n" + ("\n".join(remedies) or by_hand),
        f"## Example\n\n{example}",
        f"## When it may be wrong\n\n{_one_line(file.false_positives)}",
        f'??? note "The expression that it matches"\n\n    ```\n{folded}\n    ```',
        *(["## See also\n\n" + "\n".join(see)] if see else []),
        *(["## References\n\n" + references] if references else []),
    ]
    return "\n\n".join(lines) + "\n"


def _facts(example: dict[str, dict[str, object]]) -> str:
    return yaml.safe_dump(example, sort_keys=False, allow_unicode=True, width=88)


def _families(rules: tuple[Rule, ...]) -> list[tuple[str, list[Rule]]]:
    known = list(_FAMILIES)

    def order(rule: Rule) -> tuple[int, str, float, str]:
        family = _family(rule)
        at = known.index(family) if family in known else len(known)
        return at, family, -rule.file.confidence, rule.file.id

    return [(name, list(group)) for name, group in groupby(sorted(rules, key=order), key=_family)]


def _top(rules: tuple[Rule, ...]) -> str:
    families = _families(rules)
    links = [f"- [{_heading(name)}](#{_anchor(_heading(name))}) ({len(group)})\n" for name, group in families]
    return _HEAD.format(count=len(rules), families=len(families)) + "".join(links)


def _family(rule: Rule) -> str:
    return Path(rule.path).parent.name


def _heading(family: str) -> str:
    return _FAMILIES.get(family, family)


def _anchor(heading: str) -> str:
    """Return what GitHub makes of a heading in an address."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _table(rules: list[Rule], address: str) -> Iterator[str]:
    yield "| rule | what it says | cause | confidence |\n| --- | --- | --- | --- |\n"
    for rule in rules:
        file = rule.file
        yield f"| [`{file.id}`]({address.format(file.id)}) | {_cell(file.title)} | {file.cause.value} "
        yield f"| {file.confidence:.0%} |\n"


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
