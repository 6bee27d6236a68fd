"""``make docs``: writes ``docs/fixes.md``, one page of all fixes, from their modules and from what was measured.

``--check`` writes nothing and answers 1 where the page is not what they say. The figures are those of
``benchmarks/results/fixes.json``, which ``python benchmarks/fixes.py --write`` measures.
"""

from __future__ import annotations

import argparse
import inspect
import json
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

| fix | program | as | dose | peak before | after | | time |
| --- | --- | --- | --- | ---: | ---: | ---: | ---: |
"""


def main(argv: list[str] | None = None) -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(prog="make docs", description="Write docs/fixes.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the page is out of date")
    args = parser.parse_args(argv)
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    text = page(fixes.catalogue(), _suggesting(), measured)
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
    for effect, heading in _HEADINGS.items():
        group = [fix for fix in catalogue.values() if fix.effect is effect]
        if group:
            parts += [f"\n## {heading}\n\n| fix | | costs |\n| --- | --- | --- |\n"]
            parts += [f"| [`{fix.id}`](#{fix.id}) | {_cell(fix.title)} | {_cell(fix.cost)} |\n" for fix in group]
            parts += [_section(fix, suggesting.get(fix.id, [])) for fix in group]
    parts += [_MEASURED.format(machine=measured["machine"]), *_rows(measured["rows"])]
    return "".join(parts)


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


def _suggesting() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for rule in load([locate()], known_fixes=fixes.ids()).rules:
        for fix in rule.file.fixes:
            found.setdefault(fix, []).append(rule.file.id)
    return {fix: sorted(rules) for fix, rules in found.items()}


def _rows(rows: list[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        dose = f"`{row['dose']}`" if row["dose"] else ""
        sizes = [f"{row[key] / 2**20:.2f} MiB" for key in ("before", "after")]
        numbers = [*sizes, f"{row['after'] / row['before']:.0%}", f"x{row['time_ratio']:.2f}"]
        cells = [f"[`{row['fix']}`](#{row['fix']})", row["family"], row["form"], dose, *numbers]
        yield f"| {' | '.join(cells)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    sys.exit(main())
