"""Runs a notebook in a kernel of this interpreter, cell by cell, and reads the kernel's state after each.

nbclient does the running. What it is told here is which kernel to start: the one of ``sys.executable``, whatever
kernels are installed under the name that the notebook asks for, and with none of the user's IPython configuration.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from oomdoctor.errors import OomDoctorError
from oomdoctor.model.fix import Edit

_CELL_TIMEOUT_S: Final = 600
_SETTINGS: Final = {
    # Without it debugpy, which ipykernel loads, prints a warning about frozen modules.
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    # Threads that wait for work let the processor to others: the child that makes a forecast is another process.
    "OMP_WAIT_POLICY": "PASSIVE",
}
_PROBE: Final = "__import__('oomdoctor.cli.demo_probe', fromlist=['read']).read(globals()).encode().hex()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the kernel told after a cell.

    Attributes:
        number: of the last failure, 0 where there was none; ``case``: its JSON form.
        diagnosis: what of it is told in the words of the notebook; ``notice``: how it ended, nothing before it has.
        edits: of the cells that the fix in place changes.
    """

    number: int = 0
    case: dict[str, Any] | None = None
    diagnosis: str = ""
    notice: str = ""
    edits: tuple[Edit, ...] = ()
    losses: tuple[float, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def healed(self) -> bool:
        """Whether the last failure was healed."""
        return self.case is not None and self.case["outcome"]["kind"] == "healed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEnd:
    """A code cell that was run. ``error`` is the exception's name and message, None where it answered ok."""

    cell: NotebookNode
    elapsed_s: float
    error: str | None
    reading: Reading


class _ThisInterpreter(KernelSpecManager):
    """Knows one kernel, whatever it is asked for: that of the interpreter that runs the command."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
        return KernelSpec(argv=argv, display_name=kernel_name, language="python")


async def run_notebook(
    notebook: NotebookNode,
    *,
    directory: Path,
    on_start: Callable[[NotebookNode], None],
    on_end: Callable[[CellEnd], None],
) -> list[CellEnd]:
    """Run the code cells of ``notebook`` in a fresh kernel and put their outputs into it, also when this raises.

    Raises:
        OomDoctorError: a cell failed that is not tagged ``raises-exception``, or the kernel died.
    """
    ends: list[CellEnd] = []
    running: list[tuple[NotebookNode, float]] = []

    def started(cell: NotebookNode, cell_index: int) -> None:
        running.append((cell, time.perf_counter()))
        on_start(cell)

    async def ended(cell: NotebookNode, cell_index: int, execute_reply: dict[str, Any]) -> None:
        elapsed_s, reply = time.perf_counter() - running[-1][1], execute_reply["content"]
        error = f"{reply['ename']}: {_first_line(reply['evalue'])}" if reply["status"] == "error" else None
        ends.append(CellEnd(cell=cell, elapsed_s=elapsed_s, error=error, reading=await _read(client)))
        on_end(ends[-1])

    manager = AsyncKernelManager(kernel_spec_manager=_ThisInterpreter())
    hooks = {"on_cell_execute": started, "on_cell_executed": ended}
    client = NotebookClient(notebook, km=manager, timeout=_CELL_TIMEOUT_S, shutdown_kernel="immediate", **hooks)
    with tempfile.TemporaryDirectory(prefix="oomdoctor-demo-") as profile:
        settings = {**_SETTINGS, **os.environ, "IPYTHONDIR": profile}
        try:
            await client.async_execute(cwd=str(directory), env=settings, cleanup_kc=True)
        except CellExecutionError as failure:
            raise OomDoctorError(f"the cell {ends[-1].cell.id!r} failed: {ends[-1].error}") from failure
        except (CellTimeoutError, DeadKernelError) as failure:
            told = f"the cell {running[-1][0].id!r} did not end: {_first_line(str(failure))}"
            raise OomDoctorError(told) from failure
    return ends


async def _read(client: NotebookClient) -> Reading:
    """Read the kernel's state by an expression evaluated beside the cells: no cell is run and none is counted."""
    if client.kc is None:
        raise OomDoctorError("the kernel is gone")
    message = client.kc.execute("", silent=True, store_history=False, user_expressions={"reading": _PROBE})
    reply = await client.async_wait_for_reply(message)
    if reply is None:
        raise OomDoctorError("the kernel did not answer")
    told = reply["content"]["user_expressions"]["reading"]
    if told["status"] != "ok":
        raise OomDoctorError(f"the kernel's state could not be read: {told['ename']}: {told['evalue']}")
    values = json.loads(bytes.fromhex(told["data"]["text/plain"].strip("'")))
    edits = tuple(map(Edit.from_plain, values.pop("edits", ())))
    return Reading(edits=edits, losses=tuple(values.pop("losses")), **values)


def _first_line(text: str) -> str:
    return textwrap.shorten(text.strip().partition("\n")[0], 100, placeholder=" …")
