"""``make docs``: writes ``docs/fixes.md``, one page of all fixes, from their modules and from what was measured.

``--check`` writes nothing and answers 1 where the page is not what they say. The figures are those of
``benchmarks/results/fixes.json``, which ``python benchmarks/fixes.py --write`` measures. The site has a page of each
fix instead (``one``), below its table of all (``index``): ``tools/site_pages.py`` asks for both.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from oomdoctor import fixes
from oomdoctor.model.fix import Effect, Fix
from oomdoctor.rulebook import load, locate

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "fixes.md"
RESULTS: Final = ROOT / "benchmarks" / "results" / "fixes.json"

_HEADINGS: Final = {
    Effect.EXACT: "The same results, bit for bit",
    Effect.EQUIVALENT: "The same results, up to rounding",
    Effect.CHANGES_RESULT: "Other results, never without your asking",
    Effect.ADVICE: "Advice, shown and never applied",
}

_HEAD: Final = """\
# The fixes

<!-- Written by `make docs` from oomdoctor/fixes/ and benchmarks/results/fixes.json. Change those, not this page. -->

{count} fixes, all of [`oomdoctor/fixes/`](../oomdoctor/fixes). A fix is proposed only where the evidence of
the failure shows that it would help, and says why where it is not. The effect below is the most that it promises; for
a program at hand it may promise less, and then says so. Where the change can be written into your cells, you get it as
a diff, and a retry runs the changed source. A fix with a live form can also be put on the objects of the running
kernel, for loops that a library owns.

A *tolerance* is the largest difference of the losses and gradients of a step in float32, as a share of the largest of
them. Optimizers that divide a gradient by its own size, as Adam does, may take a parameter further apart: where its
gradient is nothing but rounding, as that of the bias of attention's keys is, each step moves it by up to the learning
rate, this way or that. So does another graphics card.

"""

_MEASURED: Final = """
## What each buys

Peak of the last cell with the mildest dose of the fix, as a share of the peak without it, and time with it as a ratio,
on the model families of [`tests/models/`](../tests/models): up to three each, those that it saves most on. The models
are small, so that what a fix does for each call weighs more in time than it does in a real run. A fix without a row
saves what these programs do not have: memory of a graphics card, of loader processes, or a leak.
Measured by `python benchmarks/fixes.py --write` on {machine}.

"""

_COLUMNS: Final = """\
| fix | program | as | dose | peak before | after | | time |
| --- | --- | --- | --- | ---: | ---: | ---: | ---: |
"""

_FIRST_RULES: Final = 6
_UNASKED: Final = "No rule suggests it: it is offered where the evidence of the failure shows that it would help."
_NO_EXAMPLE: Final = "The programs of the tests do not need it, or it has no form in the source: there is no diff."
_WHERE: Final = "[All fixes](../fixes.md#what-each-buys) says how this was measured."


def main(argv: list[str] | None = None) -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(prog="make docs", description="Write docs/fixes.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the page is out of date")
    args = parser.parse_args(argv)
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    text = page(fixes.catalogue(), suggesting(), measured)
    if args.check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is out of date: make docs", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def page(catalogue: dict[str, Fix], suggesting: dict[str, list[str]], measured: dict[str, Any]) -> str:
    """Return the page in Markdown.

    Args:
        suggesting: ids of the rules that suggest a fix, by the fix's id.
        measured: what ``benchmarks/fixes.py`` wrote.
    """
    parts = [_HEAD.format(count=len(catalogue))]
    for heading, group in _groups(catalogue):
        parts += [f"\n## {heading}\n\n", *_table(group, "#{}")]
        parts += [_section(fix, suggesting.get(fix.id, [])) for fix in group]
    parts += [_MEASURED.format(machine=measured["machine"]), _COLUMNS, *_rows(measured["rows"], "#{}")]
    return "".join(parts)


def index(catalogue: dict[str, Fix], measured: dict[str, Any]) -> str:
    """Return the site's table of all fixes in Markdown, each with a link to its page, and what was measured."""
    parts = [_HEAD.format(count=len(catalogue))]
    for heading, group in _groups(catalogue):
        parts += [f"\n## {heading}\n\n", *_table(group, "fixes/{}.md")]
    parts += [_MEASURED.format(machine=measured["machine"]), _COLUMNS, *_rows(measured["rows"], "fixes/{}.md")]
    return "".join(parts)


def one(fix: Fix, rules: dict[str, str], measured: dict[str, Any], example: dict[str, str] | None) -> str:
    """Return the site's page of one fix in Markdown; it lies in ``fixes/``, beside ``rules/``.

    Args:
        rules: titles of the rules that suggest it, by their ids, the surest first.
        example: the diff of a program of the tests, as ``tools/fix_examples.py`` wrote it.
    """
    tolerance = f", tolerance {fix.tolerance:g}" if fix.tolerance is not None else ""
    heading = _HEADINGS[fix.effect]
    rows = [row for row in measured["rows"] if row["fix"] == fix.id]
    lines = [
        f"# {fix.title}",
        f"`{fix.id}` · [{heading}](../fixes.md#{_anchor(heading)}){tolerance} · costs: {fix.cost}",
        f"## What\n\n{_about(fix)}",
        "## Why\n\n" + (_why(rules) if rules else _UNASKED),
        f"## What to do\n\n{_doing(fix)}",
        "## Example\n\n" + (_shown(example) if example else _NO_EXAMPLE),
        *([f"## What it buys\n\n{_COLUMNS}{''.join(_rows(rows, '{}.md'))}\n{_WHERE}"] if rows else []),
    ]
    return "\n\n".join(lines) + "\n"


def _groups(catalogue: dict[str, Fix]) -> Iterator[tuple[str, list[Fix]]]:
    for effect, heading in _HEADINGS.items():
        if group := [fix for fix in catalogue.values() if fix.effect is effect]:
            yield heading, group


def _table(group: list[Fix], address: str) -> Iterator[str]:
    yield "| fix | | costs |\n| --- | --- | --- |\n"
    for fix in group:
        yield f"| [`{fix.id}`]({address.format(fix.id)}) | {_cell(fix.title)} | {_cell(fix.cost)} |\n"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _about(fix: Fix) -> str:
    """Return what the module says of the fix: its own paragraph where several fixes share the module."""
    home = fixes.home(fix.id)
    paragraphs = (inspect.getdoc(import_module(home)) or "").split("\n\n")
    shared = [other for other in fixes.ids() if fixes.home(other) == home and other != fix.id]
    own = [text for text in paragraphs if text.startswith(f"``{fix.id}``")]
    if not own or not shared:
        return "\n\n".join(paragraphs)
    rest = "\n\n".join(text for text in paragraphs if text not in own)
    folded = "\n".join(f"    {line}" if line else "" for line in rest.splitlines())
    return "\n\n".join(own) + f'\n\n??? note "What it shares with {", ".join(shared)}"\n\n{folded}'


def _why(rules: dict[str, str]) -> str:
    links = [f"- [{title}](../rules/{rule}.md)" for rule, title in rules.items()]
    first, rest = links[:_FIRST_RULES], links[_FIRST_RULES:]
    folded = "\n".join(f"    {line}" for line in rest)
    more = f'\n\n??? note "and {len(rest)} more"\n\n{folded}' if rest else ""
    return "It is offered for these findings:\n\n" + "\n".join(first) + more


def _doing(fix: Fix) -> str:
    if fix.effect is Effect.ADVICE:
        return "oomdoctor shows this and changes nothing: the change is yours to make."
    told = f"`%oomdoctor fix {fix.id}` runs the failed cell again with it. `%oomdoctor diff {fix.id}` shows the change."
    live = "It can also be put on the objects of the running kernel, for loops that a library owns."
    asked = "It is made only where you ask for it by its name."
    return "\n\n".join([told, *([live] if fix.apply else []), *([asked] if fix.asks else [])])


def _shown(example: dict[str, str]) -> str:
    dose = f" with `{example['dose']}`" if example["dose"] else ""
    return f"In the program `{example['family']}` of the tests{dose}:\n\n```diff\n{example['diff'].rstrip()}\n```"


def _section(fix: Fix, rules: list[str]) -> str:
    home = fixes.home(fix.id)
    first = next(one for one in fixes.ids() if fixes.home(one) == home)
    about = inspect.getdoc(import_module(home)) or "" if first == fix.id else f"See [`{first}`](#{first})."
    tolerance = f" · *tolerance* {fix.tolerance:g}" if fix.tolerance is not None else ""
    suggested = ", ".join(f"[`{rule}`](rules.md#{rule})" for rule in rules) or "no rule: offered by its own evidence"
    lines = [
        f"\n### {fix.id}\n",
        about,
        f"*Live form* {'yes' if fix.apply else 'no'}{tolerance}"
        + (" · *only where you ask for it*" if fix.asks else ""),
        f"*Suggested by* {suggested}",
    ]
    return "\n\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def suggesting() -> dict[str, list[str]]:
    """Return the ids of the rules that suggest a fix, by the fix's id."""
    found: dict[str, list[str]] = {}
    for rule in load([locate()], known_fixes=fixes.ids()).rules:
        for fix in rule.file.fixes:
            found.setdefault(fix, []).append(rule.file.id)
    return {fix: sorted(rules) for fix, rules in found.items()}


def _rows(rows: list[dict[str, Any]], address: str) -> Iterator[str]:
    for row in rows:
        dose = f"`{row['dose']}`" if row["dose"] else ""
        sizes = [f"{row[key] / 2**20:.2f} MiB" for key in ("before", "after")]
        numbers = [*sizes, f"{row['after'] / row['before']:.0%}", f"x{row['time_ratio']:.2f}"]
        cells = [f"[`{row['fix']}`]({address.format(row['fix'])})", row["family"], row["form"], dose, *numbers]
        yield f"| {' | '.join(cells)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    sys.exit(main())
