"""The last step of ``make site``: every link within the built pages leads to a page, a file or a heading that is there.

``mkdocs build --strict`` checks what is written in Markdown; this reads the pages themselves, so that what templates,
notebooks and docstrings put in is checked too. Links to other hosts are counted and not followed.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """The links and the places of one page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


def broken(folder: Path) -> tuple[list[str], int, int]:
    """Return the links of a site that lead nowhere, how many were followed, and how many lead to other hosts."""
    pages = {path: _read(path) for path in sorted(folder.rglob("*.html"))}
    faults, followed, elsewhere = [], 0, 0
    for path, page in pages.items():
        if path.name == "404.html":  # is served from any depth: its links begin at the root
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                elsewhere += parts.scheme in ("http", "https")
                continue
            followed += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                faults.append(f"{path.relative_to(folder)}: {link}: there is no such page or file")
            elif parts.fragment and target.suffix == ".html":
                there = pages.get(target) or pages.get(folder / target.relative_to(folder.resolve()))
                if there is None or unquote(parts.fragment) not in there.places:
                    faults.append(f"{path.relative_to(folder)}: {link}: there is no such place on that page")
    return faults, followed, elsewhere


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def main(argv: list[str]) -> int:
    """Check the site in the folder that is named."""
    faults, followed, elsewhere = broken(Path(argv[0]))
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{followed} links within the site followed, {len(faults)} lead nowhere; {elsewhere} lead to other hosts")
    return 1 if faults or not followed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
