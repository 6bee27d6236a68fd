"""``oomdoctor demo``: the notebook ``01_first_oom`` run in a real kernel, told as it happens, and checked.

Not a film: nothing here knows how the story ends. A cell that was not healed, or that left another state than a
second, fresh kernel reaches which runs the changed cells without oomdoctor, makes the command fail.

nbclient runs the notebook. It is told which kernel to start: the one of ``sys.executable``, whatever kernels are
installed under the name that the notebook asks for, and with none of the user's IPython configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from oomdoctor.errors import NotAvailable, OomDoctorError
from oomdoctor.language import say
from oomdoctor.model.fix import Edit, Patch

if TYPE_CHECKING:
    from nbclient import NotebookClient
    from nbformat import NotebookNode


_NOTEBOOK: Final = "01_first_oom.ipynb"
_TOLD: Final = ("model", "optimizer", "losses", "(random number generators)")
_CELL_TIMEOUT_S: Final = 600
_SETTINGS: Final = {
    # Without it debugpy, which ipykernel loads, prints a warning about frozen modules.
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    # Threads that wait for work let the processor to others: the child that makes a forecast is another process.
    "OMP_WAIT_POLICY": "PASSIVE",
}
_SHOWN_FIXES: Final = 4
_WIDTH: Final = 72
_PROBE: Final = "__import__('oomdoctor.cli.demo', fromlist=['read']).read(globals()).encode().hex()"


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``oomdoctor demo``."""
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        metavar="DIR",
        help="folder for the executed notebook and its HTML page (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the cases as JSON instead of telling the story")


def run(args: argparse.Namespace) -> int:
    """Run the demo; an ``OomDoctorError`` says what was not healed, or left another state than a fresh run."""
    console = Console(stderr=args.json, highlight=False)
    report = asyncio.run(_demo(args.output.resolve(), console))
    if args.json:
        print(json.dumps(report, indent=2))
    return 0


def notebook_path() -> Path:
    """Return where the demo's notebook lies: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "_notebooks" / _NOTEBOOK, package.parent / "notebooks" / _NOTEBOOK)
    for place in places:
        if place.is_file():
            return place
    raise NotAvailable(f"the demo's notebook {_NOTEBOOK} is neither in {places[0].parent} nor in {places[1].parent}")


async def _demo(output: Path, console: Console) -> dict[str, Any]:
    try:
        import nbclient
        import nbconvert
        import nbformat
    except ImportError as error:
        raise NotAvailable(f"{error.name} is missing; the demo needs: pip install 'oomdoctor[demo]'") from error
    del nbclient, nbconvert
    source = nbformat.read(notebook_path(), as_version=4)
    output.mkdir(parents=True, exist_ok=True)

    console.print(say(f"[bold]{_NOTEBOOK}[/bold], in a kernel of {escape(sys.executable)}"))
    notebook = nbformat.from_dict(source)
    try:
        ends = await _told_run(notebook, output, console, tells_cases=True)
    finally:
        written = _write(notebook, output)
    pairs = healed_pairs(ends)

    told = say("[bold]The changed cells in a second, fresh kernel[/bold], without oomdoctor, without a limit")
    console.print(f"\n{told}")
    fresh = await _told_run(fresh_notebook(source, ends), output, console, tells_cases=False)
    for line in compare(pairs, fresh):
        console.print(f"  {say(line)}")
    console.print()
    for path in written:
        console.print(say(f"wrote {escape(str(path))}"), soft_wrap=True)
    return {
        "schema": 1,
        "cases": [end.reading.case for _, end in pairs],
        "losses": list(ends[-1].reading.losses),
        "files": [str(path) for path in written],
    }


async def _told_run(notebook: NotebookNode, output: Path, console: Console, *, tells_cases: bool) -> list[CellEnd]:
    """Run ``notebook`` and print each cell as it ends; on a terminal, a spinner shows which one is running."""
    told = (0, "")

    def tell(end: CellEnd) -> None:
        nonlocal told
        error = f"  [red]failed[/red] {escape(end.error)}" if end.error else ""
        line = f"  {escape(end.cell.id):<12}{end.elapsed_s:>7.1f} s{error}"
        console.print(line, overflow="ellipsis", no_wrap=True)
        before, told = told, (end.reading.number, end.reading.notice)
        if tells_cases and told != before:
            text = end.reading.notice if told[0] == before[0] else end.reading.diagnosis + end.reading.notice
            if end.reading.notice and (losses := end.reading.losses):
                text += "  " + say(f"loss {losses[0]:.2f} at the first step, {losses[-1]:.2f} at step {len(losses)}")
            console.print(Padding(Text(text), (0, 0, 0, 6)))
            if end.reading.healed and (patch := Patch(edits=end.reading.edits)).edits:
                names = " and ".join(edit.name for edit in patch.edits)
                change = f"{say(f'The change of {names}:')}\n{patch.diff()}"
                console.print(
                    Text(textwrap.indent(change, " " * 6)), soft_wrap=True
                )  # a line that is broken is none of a diff

    with console.status(say("The kernel starts …")) as status:
        return await run_notebook(
            notebook, directory=output, on_start=lambda cell: status.update(f"{escape(cell.id)} …"), on_end=tell
        )


def healed_pairs(ends: Iterable[CellEnd]) -> list[tuple[str, CellEnd]]:
    """Return ``(id of the cell that failed, the cell that healed it)`` for each failure; these may be one.

    Raises:
        OomDoctorError: nothing failed, or a failure was not healed.
    """
    failures: dict[int, list[CellEnd]] = {}
    for end in ends:
        if end.reading.number:
            failures.setdefault(end.reading.number, []).append(end)
    if not failures:
        raise OomDoctorError("no cell ran out of memory, so nothing was shown")
    pairs: list[tuple[str, CellEnd]] = []
    for number, seen in failures.items():
        healed = next((end for end in seen if end.reading.healed), None)
        if healed is None:
            outcome = (seen[-1].reading.case or {})["outcome"]
            raise OomDoctorError(f"failure {number} was not healed: {outcome['kind']}. {outcome['why']}".rstrip(". "))
        pairs.append((seen[0].cell.id, healed))
    return pairs


def fresh_notebook(source: NotebookNode, ends: Iterable[CellEnd]) -> NotebookNode:
    """Return ``source`` with the changed cells in place and without the cells that only speak to oomdoctor.

    What a fix changes in a cell that an earlier failure has already been through comes as a cell before the one that
    failed: there the retry made that change, and the earlier failure was healed without it.

    Raises:
        OomDoctorError: a fix in place has no patch, so there is no changed cell to run.
    """
    import nbformat

    ends = list(ends)
    code = [cell for cell in source.cells if cell.cell_type == "code"]
    place = {cell.id: number for number, cell in enumerate(code)}
    id_of = {end.cell.execution_count: end.cell.id for end in ends}
    changed: dict[str, str] = {}
    beside: dict[str, list[str]] = {}
    passed = -1
    for failed, healed in healed_pairs(ends):
        if not healed.reading.edits:
            number = healed.reading.number
            raise OomDoctorError(f"the fix of failure {number} has no patch, so no fresh run can check it")
        for edit in healed.reading.edits:
            if place[id_of[edit.cell]] > passed:
                changed[id_of[edit.cell]] = edit.after
            else:
                beside.setdefault(failed, []).append(edit.replay)
        passed = max(passed, place[failed])
    notebook: NotebookNode = nbformat.from_dict(source)
    notebook.cells = []
    for cell in nbformat.from_dict(code):
        if not all(line.startswith("%") for line in cell.source.splitlines() if line.strip()):  # it speaks to oomdoctor
            for number, replay in enumerate(beside.get(cell.id, ()), 1):
                notebook.cells.append(nbformat.v4.new_code_cell(replay, id=f"{cell.id}-{number}"))
            cell.source = changed.get(cell.id, cell.source)
            cell.metadata = {}
            notebook.cells.append(cell)
    return notebook


def compare(pairs: Iterable[tuple[str, CellEnd]], fresh: Iterable[CellEnd]) -> list[str]:
    """Return a line for each healed cell whose state is a fresh run's, bit for bit; an error where it is not."""
    by_id = {end.cell.id: end for end in fresh}
    lines: list[str] = []
    differences: list[str] = []
    for failed, healed in pairs:
        here, there = healed.reading.digests, by_id[failed].reading.digests
        parts = tuple(part for part in sorted(here.keys() | there.keys()) if here.get(part) != there.get(part))
        if parts or not here:
            differences.append(f"after the cell {failed!r}: {', '.join(parts) or 'no state was read'}")
        told = ", ".join(name for name in here if name in _TOLD)
        lines.append(
            f"[green]same state[/green] after {escape(failed)}, bit for bit: {len(here)} values, among them {told}"
        )
    if differences:
        raise OomDoctorError("the healed state is not that of a fresh run, " + "; ".join(differences))
    return lines


def _write(notebook: NotebookNode, output: Path) -> tuple[Path, Path]:
    import nbformat

    with warnings.catch_warnings():
        # nbconvert and its dependencies warn about their own deprecations; the page is what counts here.
        warnings.simplefilter("ignore")
        from nbconvert import HTMLExporter

        page, _ = HTMLExporter().from_notebook_node(notebook)
    executed, html = output / _NOTEBOOK, output / Path(_NOTEBOOK).with_suffix(".html")
    nbformat.write(notebook, executed)
    html.write_text(page, encoding="utf-8")
    return executed, html


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
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    class ThisInterpreter(KernelSpecManager):
        def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
            return KernelSpec(argv=argv, display_name=kernel_name, language="python")

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

    manager = AsyncKernelManager(kernel_spec_manager=ThisInterpreter())
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


def read(namespace: dict[str, Any]) -> str:
    """Return a ``Reading`` of ``namespace`` as JSON; this runs in the kernel, and changes nothing there."""
    from oomdoctor.objects.leaves import state_digests

    return json.dumps({**_last_case(), "losses": namespace.get("losses", []), "digests": state_digests(namespace)})


def _last_case() -> dict[str, Any]:
    # A kernel in which nothing has failed, or without the extension, has not loaded the pipeline, and need not.
    pipeline = sys.modules.get("oomdoctor.pipeline")
    case = pipeline.last_case() if pipeline is not None else None
    if case is None:
        return {}
    from oomdoctor.model.case import OutcomeKind
    from oomdoctor.views import text
    from oomdoctor.views.diagnosis import causes, headline
    from oomdoctor.views.document import GAP, Fixes, Line
    from oomdoctor.views.outcome import aftermath
    from oomdoctor.views.prices import fix_rows

    told = Line(headline(case.incident, case.evidence)), GAP, causes(case.findings[:1])
    patch = next((one.patch for one in reversed(case.plan.candidates) if one.label in case.outcome.fixes), None)
    return {
        "number": case.number,
        "case": case.to_dict(),
        "diagnosis": text.render((*told, Fixes(fix_rows(case.plan)[:_SHOWN_FIXES])), width=_WIDTH),
        "notice": "" if case.outcome.kind is OutcomeKind.OFFERED else text.render((aftermath(case),), width=_WIDTH),
        "edits": [asdict(edit) for edit in getattr(patch, "edits", ())],
    }
