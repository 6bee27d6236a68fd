"""Pages of the site from notebooks that were executed: their texts, their code and what it put out.

What a cell showed as HTML, as a diagnosis is, is put into the page when its Markdown has been rendered. Tracebacks and
long texts are folded.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_LONG_LINES: Final = 25
_PLACE: Final = re.compile(r'<div data-shown="(\d+)-(\d+)"></div>')


def pages(name: str, notebook: dict[str, Any]) -> dict[str, str | bytes]:
    """Return the page of a notebook and its pictures, by their paths in the site."""
    made: dict[str, str | bytes] = {}
    parts = []
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for at, output in enumerate(cell["outputs"]):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"gallery/{name}/{number}-{at}.png"
                made[picture] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![What the cell above drew]({name}/{number}-{at}.png)")
            elif "text/html" in data:
                parts.append(f'<div data-shown="{number}-{at}"></div>')
            else:
                parts += _told(output)
    made[f"gallery/{name}.md"] = "\n\n".join(parts) + "\n"
    return made


def filled(html: str, path: Path) -> str:
    """Return the page with what cells showed as HTML in its place."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]

    def shown(found: re.Match[str]) -> str:
        return "".join(cells[int(found[1])]["outputs"][int(found[2])]["data"]["text/html"])

    return _PLACE.sub(shown, html)


def _told(output: dict[str, Any]) -> Iterator[str]:
    if output["output_type"] == "error":
        text, title, kind = "\n".join(output["traceback"]), f"{output['ename']}: the traceback", "failure"
    else:
        text, title, kind = (
            "".join(output.get("text") or output["data"]["text/plain"]).rstrip(),
            "What it put out",
            "note",
        )
    if not text.strip():
        return
    language = "diff" if text.startswith("--- ") else "text"
    fence = f"```{language}\n{text}\n```"
    if kind == "failure" or text.count("\n") > _LONG_LINES:
        indented = "\n".join(f"    {line}" if line else "" for line in fence.splitlines())
        yield f'??? {kind} "{title}"\n\n{indented}'
    else:
        yield fence
