"""A notebook of the gallery, executed by nbclient in a kernel of this interpreter, and what it put out."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

__all__ = ["NOTEBOOKS", "Executed", "execute"]

NOTEBOOKS: Final = Path(__file__).resolve().parents[2] / "notebooks"
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")
_CELL_S: Final = 170
_FORECAST_S: Final = 60
_ASKED: Final = "asked-by-the-test"


class _ThisInterpreter(KernelSpecManager):
    """Knows one kernel, whatever it is asked for."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
        return KernelSpec(argv=argv, display_name=kernel_name, language="python")


@dataclass(frozen=True)
class Executed:
    """A notebook with its outputs, and the values that the test asked for at its end."""

    notebook: Any
    asked: Any

    def cell(self, name: str) -> Any:
        (found,) = [cell for cell in self.notebook.cells if cell.id == name]
        return found

    def text(self, name: str) -> str:
        """All that a person would read below a cell, one word after the other."""
        shown = []
        for output in self.cell(name).outputs:
            if output.output_type == "stream":
                shown.append(output.text)
            elif output.output_type == "error":
                shown.append("\n".join(output.traceback))
            else:
                shown.append(output.data.get("text/plain", ""))
        return " ".join(_ANSI.sub("", "\n".join(shown)).split())

    def data(self, name: str, mime: str) -> list[str]:
        return [output.data[mime] for output in self.cell(name).outputs if mime in output.get("data", {})]

    def error(self, name: str) -> str | None:
        """The name of the exception that a cell ended with."""
        return next((output.ename for output in self.cell(name).outputs if output.output_type == "error"), None)


def execute(name: str, folder: Path, ask: str) -> Executed:
    """Execute a notebook in ``folder``, and at its end evaluate ``ask``, which JSON can carry.

    A cell that fails and is not tagged ``raises-exception`` raises here, as does one that is and goes well.
    """
    notebook = nbformat.read(str(NOTEBOOKS / f"{name}.ipynb"), as_version=4)
    last = nbformat.v4.new_code_cell(f"print(__import__('json').dumps({ask}))", id=_ASKED)
    notebook.cells.append(last)
    manager = AsyncKernelManager(kernel_spec_manager=_ThisInterpreter())
    client = NotebookClient(notebook, km=manager, timeout=_CELL_S, shutdown_kernel="immediate")
    with tempfile.TemporaryDirectory(prefix="oomdoctor-gallery-") as home:
        profile = Path(home, "profile_default")
        profile.mkdir()
        # A machine that runs other tests beside this one takes longer for the same forecasts.
        (profile / "ipython_config.py").write_text(f"c.OomDoctor.forecast_time_s = {_FORECAST_S}\n", encoding="utf-8")
        settings = {"IPYTHONDIR": home, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        client.execute(cwd=str(folder), env={**os.environ, **settings}, cleanup_kc=True)
    for cell in notebook.cells:
        failed = any(output.output_type == "error" for output in cell.get("outputs", ()))
        assert failed is ("raises-exception" in cell.metadata.get("tags", ())), f"{cell.id}: {cell.outputs}"
    return Executed(notebook, json.loads(last.outputs[0].text))
