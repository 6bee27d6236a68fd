"""``make docs``: writes the badges of README, as pictures of what ``pyproject.toml`` says.

``--check`` writes nothing and answers 1 where one is not what it says. They are files, so that a page with them asks
no other host.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_LETTER_PIXELS: Final = 7
_BADGE: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{name}: {value}">
<title>{name}: {value}</title>
<rect width="{width}" height="20" rx="3" fill="#37474f"/>
<path d="M{left} 0h{right_flat}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{right_flat}z" fill="#1565c0"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{name_at}" y="14">{name}</text>
<text x="{value_at}" y="14">{value}</text>
</g>
</svg>
"""


def main(argv: list[str] | None = None) -> int:
    """Write the badges, or say whether they are up to date."""
    parser = argparse.ArgumentParser(prog="make docs", description="Write the badges of README.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where one is out of date")
    args = parser.parse_args(argv)
    stale = 0
    for name, value in said().items():
        path, text = ROOT / "docs" / "images" / f"badge-{name}.svg", badge(name, value)
        if not args.check:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale = 1
            print(f"{path.relative_to(ROOT)} is out of date: make docs", file=sys.stderr)
    return stale


def said() -> dict[str, str]:
    """Return what the badges say, by their names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(one for one in project["dependencies"] if re.match(r"torch\W", one))
    return {
        "python": project["requires-python"].removeprefix(">=") + "+",
        "torch": torch.removeprefix("torch>=") + "+",
        "license": project["license"],
    }


def badge(name: str, value: str) -> str:
    """Return a badge as SVG."""
    left, right = (_LETTER_PIXELS * len(text) + 12 for text in (name, value))
    return _BADGE.format(
        name=name,
        value=value,
        width=left + right,
        left=left,
        right_flat=right - 3,
        name_at=left / 2,
        value_at=left + right / 2,
    )


if __name__ == "__main__":
    sys.exit(main())
