"""The hooks of ``make site``: pages that are made while the site is built, and links that lead into the checkout.

A page of each rule (``rules/ID/``), of each fix (``fixes/ID/``) and of each notebook (``gallery/NAME/``), README as the
first page. What the pages link to in the checkout becomes the page or the file that stands for it here; a folder of
sources has none, and leaves its text. Nothing here imports torch.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import fixes_page  # noqa: E402
import rules_page  # noqa: E402
import site_notebooks  # noqa: E402

from oomdoctor import fixes  # noqa: E402
from oomdoctor.rulebook import load, locate  # noqa: E402

_PAGES: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "tests/stubcuda/README.md": "stubcuda.md",
}
"""Pages of the site by the file of the checkout that they are."""

_LINK: Final = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<to>[^)\s]+)\)")
_ONE_OF_ALL: Final = re.compile(r"^(?P<page>rules|fixes)\.md#(?P<id>\w+)$")


@cache
def generated() -> dict[str, str | bytes]:
    """Return what is made for the site, by its path in it."""
    rules = load([locate()], known_fixes=fixes.ids()).rules
    titles = {rule.file.id: rule.file.title for rule in rules}
    surest = {rule.file.id: rule.file.confidence for rule in rules}
    catalogue, suggesting = fixes.catalogue(), fixes_page.suggesting()
    measured = json.loads(fixes_page.RESULTS.read_text(encoding="utf-8"))
    examples = json.loads((ROOT / "docs" / "examples" / "fixes.json").read_text(encoding="utf-8"))
    made: dict[str, str | bytes] = {
        "rules.md": rules_page.index(rules),
        "fixes.md": fixes_page.index(catalogue, measured),
    }
    for rule in rules:
        made[f"rules/{rule.file.id}.md"] = rules_page.one(rule, rules)
    for fix in catalogue.values():
        suggested = {rule: titles[rule] for rule in sorted(suggesting.get(fix.id, []), key=lambda one: -surest[one])}
        made[f"fixes/{fix.id}.md"] = fixes_page.one(fix, suggested, measured, examples.get(fix.id))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        made |= site_notebooks.pages(path.stem, json.loads(path.read_text(encoding="utf-8")))
    for name, page in _PAGES.items():
        made[page] = (ROOT / name).read_text(encoding="utf-8")
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.txt")):
        made[f"benchmarks/results/{path.name}"] = path.read_bytes()
    return made


def place(path: str) -> str | None:
    """Return where a file or a folder of the checkout is in the site, None where it is not there."""
    if path in _PAGES:
        return _PAGES[path]
    if path == "rules":
        return "rules.md"
    inside = re.fullmatch(r"notebooks/(\w+)\.ipynb", path)
    if inside:
        return f"gallery/{inside[1]}.md"
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    return path if path in generated() else None


def linked(text: str, page: str) -> str:
    """Return the text of a page of the site with each link to the checkout leading to what stands for it."""
    origin = next((name for name, made in _PAGES.items() if made == page), f"docs/{page}")

    def changed(found: re.Match[str]) -> str:
        to, _, anchor = found["to"].partition("#")
        if not to or ":" in to or page.startswith(("rules/", "fixes/", "gallery/")):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), to))
        there = place(path)
        if there is None and not (ROOT / path).exists():
            there = posixpath.relpath(path, "docs") if path.startswith("docs/") else to
        if there is None:
            return found["text"]
        of_one = _ONE_OF_ALL.match(f"{there}#{anchor}")
        if of_one and f"{of_one['page']}/{of_one['id']}.md" in generated():
            there, anchor = f"{of_one['page']}/{of_one['id']}.md", ""
        way = posixpath.relpath(there, posixpath.dirname(page) or ".")
        return f"{found['picture']}[{found['text']}]({way}{'#' + anchor if anchor else ''})"

    return "".join(_LINK.sub(changed, part) if prose else part for prose, part in _parts(text))


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Yield the text in parts: whether it is prose, or code between fences."""
    for at, part in enumerate(re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)):
        yield at % 2 == 0, part


def on_files(files: Any, config: Any) -> Any:
    """Add what is made to the files of the site."""
    from mkdocs.structure.files import File

    generated.cache_clear()
    for path, content in generated().items():
        if (there := files.get_file_from_path(path)) is not None:
            files.remove(there)
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Lead links of the checkout to their pages."""
    return linked(markdown, page.file.src_uri)


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Put what cells showed as HTML into the pages of notebooks, which Markdown would change."""
    name = re.fullmatch(r"gallery/(\w+)\.md", page.file.src_uri)
    return site_notebooks.filled(html, ROOT / "notebooks" / f"{name[1]}.ipynb") if name else html
