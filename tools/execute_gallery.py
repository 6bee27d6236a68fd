"""``make gallery``: executes the notebooks in place, so that they can be read on the web with what they put out.

Live widgets are left out, which a saved notebook cannot show: what they would say stands in the diagnosis beside them.
So are the times of cells, the colours of text, and the folders of the machine at hand. A digest of the sources is kept
in the notebook's metadata: a test tells when a notebook was edited and not executed since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import nbformat
from nbclient import NotebookClient

NOTEBOOKS: Final = Path(__file__).resolve().parents[1] / "notebooks"
DIGEST: Final = "executed_source"
_WIDGET: Final = "application/vnd.jupyter.widget-view+json"
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")
_CELL_S: Final = 600
_NEEDS: Final = {"09_several_ranks": "ipyparallel", "10_jittor": "jittor"}
"""What a notebook needs that the others do not."""
_FOLDERS: Final = {
    re.compile(re.escape(sysconfig.get_path("purelib"))): "site-packages",
    re.compile(re.escape(sysconfig.get_path("stdlib"))): "lib/python3",
    re.compile(re.escape(str(NOTEBOOKS.parent)) + "/"): "",
    re.compile(r"/tmp/(?:ipykernel_\d+|oomdoctor-gallery-\w+)/"): "",
    re.compile(r"/tmp/tmp\w+"): "/tmp/folder",
}
"""What stands for a folder that is another one on each machine; the first that matches is taken first."""


def main(argv: list[str] | None = None) -> int:
    """Execute those that are named, or all."""
    parser = argparse.ArgumentParser(prog="make gallery", description="Execute the notebooks in place.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as 01_first_oom; all that can be")
    args = parser.parse_args(argv)
    every = [path for path in sorted(NOTEBOOKS.glob("*.ipynb")) if find_spec(_NEEDS.get(path.stem, "oomdoctor"))]
    for path in [NOTEBOOKS / f"{name}.ipynb" for name in args.names] or every:
        notebook = executed(nbformat.read(str(path), as_version=4))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"wrote notebooks/{path.name}, {path.stat().st_size / 2**10:.0f} KiB")
    return 0


def digest(notebook: dict[str, Any]) -> str:
    """Return a digest of the code of a notebook."""
    code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def executed(notebook: Any) -> dict[str, Any]:
    """Return the notebook with its outputs, in the form that is committed.

    Raises:
        CellExecutionError: a cell failed that is not tagged ``raises-exception``.
    """
    folder = tempfile.mkdtemp(prefix="oomdoctor-gallery-")
    try:
        NotebookClient(notebook, timeout=_CELL_S, kernel_name="python3", store_widget_state=False).execute(cwd=folder)
    finally:
        shutil.rmtree(folder)
    return committed(json.loads(nbformat.writes(notebook)))


def committed(told: dict[str, Any]) -> dict[str, Any]:
    """Return an executed notebook without what is of one machine, of one run, or alive."""
    for cell in told["cells"]:
        if cell["cell_type"] == "code":
            cell["metadata"].pop("execution", None)
            cell["outputs"] = [_plain(output) for output in cell["outputs"] if _WIDGET not in output.get("data", {})]
    told["metadata"] = {
        "kernelspec": told["metadata"]["kernelspec"],
        "language_info": {"name": "python"},
        DIGEST: digest(told),
    }
    return told


def _plain(told: Any) -> Any:
    """Return a part of an output, every text in it without colours and folders."""
    if isinstance(told, dict):
        return {name: _plain(part) for name, part in told.items()}
    if isinstance(told, list):
        return [_plain(part) for part in told]
    if isinstance(told, str):
        told = _ANSI.sub("", told)
        for folder, name in _FOLDERS.items():
            told = folder.sub(name, told)
    return told


if __name__ == "__main__":
    sys.exit(main())
