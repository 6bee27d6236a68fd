"""``make docs``: writes ``docs/configuration.md``, one page of all settings, from the traits that hold them.

``--check`` writes nothing and answers 1 where the page is not what they say. A setting is described where it is
defined; the page is for reading and for links.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from traitlets import Bool, Enum, Float, Int, List, TraitType, Unicode

from oomdoctor.shell.config import OomDoctor

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "configuration.md"

_HEAD: Final = """\
# The settings

<!-- Written by `make docs` from oomdoctor/shell/config.py. Change that, not this page. -->

{count} settings of the IPython extension. In `ipython_config.py` they hold from the start:

```python
c.OomDoctor.{first} = {value}
```

In a notebook, after `%load_ext oomdoctor`, they hold from then on: `%config OomDoctor.{first} = {value}`. A value that
is not accepted changes nothing. `%oomdoctor config` shows the settings in force. Scripts give theirs where they call
(`oomdoctor.heal(attempts=5)`) or on the command line (`oomdoctor run --help`).

| setting | accepts | unless set | |
| --- | --- | --- | --- |
"""


def main(argv: list[str] | None = None) -> int:
    """Write the page, or say whether it is up to date."""
    parser = argparse.ArgumentParser(prog="make docs", description="Write docs/configuration.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where the page is out of date")
    args = parser.parse_args(argv)
    text = page(OomDoctor.class_own_traits(config=True))
    if args.check:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is out of date: make docs", file=sys.stderr)
        return 1
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def page(settings: dict[str, TraitType[Any, Any]]) -> str:
    """Return the page in Markdown, the settings in the order of their definition."""
    order = [name for name in vars(OomDoctor) if name in settings]
    head = _HEAD.format(count=len(order), first="auto", value='"exact"')
    return head + "".join(_rows({name: settings[name] for name in order}))


def _rows(settings: dict[str, TraitType[Any, Any]]) -> Iterator[str]:
    for name, trait in settings.items():
        cells = [f"`{name}`", accepts(trait), f"`{_written(trait.default())}`", trait.help.replace("|", r"\|")]
        yield f"| {' | '.join(cells)} |\n"


def accepts(trait: TraitType[Any, Any]) -> str:
    """Return in words what may be assigned.

    Raises:
        TypeError: it is a kind of trait that has no words here yet.
    """
    if isinstance(trait, Enum):
        return ", ".join(f"`{_written(value)}`" for value in trait.values or ())
    if isinstance(trait, Bool):
        return "`True`, `False`"
    if isinstance(trait, (Int, Float)):
        return ("a whole number" if isinstance(trait, Int) else "a number") + _bounds(trait.min, trait.max)
    if isinstance(trait, Unicode):
        return "a text"
    if isinstance(trait, List) and isinstance(trait._trait, Unicode):
        return "a list of texts"
    raise TypeError(f"{trait.name} is a {type(trait).__name__}, which tools/configuration_page.py cannot describe")


def _bounds(least: float | None, most: float | None) -> str:
    least_given, most_given = (
        value is not None and value not in (float("inf"), -float("inf")) for value in (least, most)
    )
    if least_given and most_given:
        return f" from {least:g} to {most:g}"
    if least_given:
        return f", {least:g} or more"
    return f", {most:g} or less" if most_given else ""


def _written(value: object) -> str:
    """Return a value as it is written in the settings file, strings with double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    sys.exit(main())
