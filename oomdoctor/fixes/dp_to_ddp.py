"""A process for each device in the place of ``nn.DataParallel``, whose first device holds more than the others.

DataParallel gathers the outputs of all devices on the first one, which computes the loss and holds its gradients. With
``DistributedDataParallel`` each device keeps its own part. It is advice, since a notebook is one process: the patched
cells are a program to be started by ``torchrun``. Each process takes its part of every batch, so that a step sees the
samples that it saw before; the loss of a step is the mean over the part of that process.

The patch is the plain case: one wrapped model, loaders made in the cells for the training loops, and no device but the
first named by its number. Everything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import libcst as cst
import libcst.matchers as m

from oomdoctor.fixes import _class_calls, _ddp_ranks
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Census, Role
from oomdoctor.model.session import Cell
from oomdoctor.model.sizes import format_size
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.names import imports_in
from oomdoctor.program.rewriting import New, exchange, within

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "patch", "propose"]

_CAVEAT: Final = (
    "the cells then are a program that torchrun starts once for each device; every process prints and saves for "
    "itself, and where the samples do not come out even some are seen twice"
)
_NUMBERED: Final = re.compile(r"cuda:[1-9]|\bcuda\(\s*\d|\.to\(\s*\d|\bset_device\b|CUDA_VISIBLE_DEVICES|f[\"']cuda:")
_STARTS: Final = re.compile(r"\binit_process_group\b|\bDistributedDataParallel\b|\bnotebook_launcher\b|\bAccelerator\(")
_MOVE: Final = m.Call(func=m.Attribute(attr=m.Name("to") | m.Name("cuda")))
_ALL: Final = re.compile(r"(list\()?range\(torch\.cuda\.device_count\(\)\)\)?")
_OTHERWISE: Final = ("sampler", "batch_sampler")
"""What says already which samples come."""


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where the census found more passing tensors on the first device than on the others."""
    told = evidence.code.data_parallel
    if told is None:
        return Refused("no model is wrapped in nn.DataParallel")
    first, *others = [census for census in evidence.censuses if census.device.startswith("cuda")] or [evidence.census]
    if not first.device.endswith(":0") or (incident.device or first.device) != first.device:
        return Refused("it is not the first device that ran out, where DataParallel gathers the outputs")
    if not others:
        return Refused("one device is in use, so DataParallel gathers nothing there")
    most = max(map(_passing, others))
    more = _passing(first) - most
    if more <= 0:
        return Refused(f"{first.device} holds no more activations than the other devices")
    return (
        Proposal(
            dose=Dose(),
            effect=Effect.ADVICE,
            saves=more,
            slowdown=1.0,
            basis=f"the census found {format_size(_passing(first))} of activations and batches on {first.device}, and "
            f"{format_size(most)} at most on another device",
            caveat=_CAVEAT,
        ),
    )


def _passing(census: Census) -> int:
    return census.bytes_of(Role.ACTIVATION) + census.bytes_of(Role.BATCH)


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells as a program with a process for each device."""
    del dose
    if (used := next((m for cell in cells.history if (m := _STARTS.search(cell.source))), None)) is not None:
        return Refused(f"the cells start processes already: `{used[0]}`")
    if (used := next((m for cell in cells.history if (m := _NUMBERED.search(cell.source))), None)) is not None:
        return Refused(f"`{used[0]}` names one device, where each process has to have its own")
    found = _class_calls.find(cells, "DataParallel")
    if isinstance(found, Refused):
        return found
    if len(found) != 1 or found[0].target is None:
        return Refused("no cell wraps one model in DataParallel, under a name")
    loops = tuple(loop for loop in evidence.code.loops if loop.in_failing_run)
    loaders = _loaders(cells, loops)
    if isinstance(loaders, Refused):
        return loaders
    return _Program(cells, found[0], loaders, loops).patch()


class _Program:
    """The changes of one program, cell by cell."""

    def __init__(
        self,
        cells: Cells,
        wrapper: _class_calls.Call,
        loaders: tuple[_class_calls.Call, ...],
        loops: tuple[TrainingLoop, ...],
    ) -> None:
        self._cells, self._wrapper, self._loaders, self._loops = cells, wrapper, loaders, loops
        self._dist = rewriting.fresh_name("dist", cells)
        self._parsed: dict[int, rewriting.ParsedCell] = {one.cell.number: one.parsed for one in (wrapper, *loaders)}
        self._nodes: dict[int, dict[cst.CSTNode, New]] = {}
        self._tops: dict[int, list[str]] = {}

    def patch(self) -> Patch | Refused:
        """Return all changes as one patch."""
        for step in (self._wrap, self._share_out, self._name_no_device, self._draw_anew, self._start):
            if (why := step()) is not None:
                return Refused(why)
        touched = sorted({*self._nodes, *self._tops})
        return rewriting.join(self._cells, [self._edit(self._cells.get(number)) for number in touched])

    def _edit(self, cell: Cell) -> Edit | Refused:
        parsed = self._parsed[cell.number]
        module = exchange(parsed.module, self._nodes.get(cell.number, {}))
        after = rewriting.write(parsed, import_lines.insert_at_top(parsed, module, self._tops.get(cell.number, [])))
        if isinstance(after, Refused):
            return after
        # Advice is never run: what would be run for it is the whole cell.
        return Edit(cell=cell.number, before=cell.source, after=after, replay=after)

    def _exchange(self, cell: Cell, old: cst.CSTNode, new: New) -> None:
        self._nodes.setdefault(cell.number, {})[old] = new

    def _import(self, cell: Cell, module: str, attribute: str) -> str:
        name = import_lines.name_for(module, attribute, self._cells, f"torch_{attribute}")
        top = self._tops.setdefault(cell.number, [])
        text = import_lines.source_of(module, attribute, name)
        top += [] if text in top else [text]
        return name

    def _wrap(self) -> str | None:
        """Wrap the model for this process, on its device."""
        one = self._wrapper
        given, *others = one.node.args
        if given.star or (given.keyword and given.keyword.value != "module"):
            return f"{one.where} gives the model in a way that is not followed"
        self._processes = _processes(others)
        if self._processes is None:
            return f"{one.where} names the devices in a way that is not followed"
        small = one.statement.body[0] if isinstance(one.statement, cst.SimpleStatementLine) else None
        value = small.value if isinstance(small, cst.Assign | cst.AnnAssign) else None
        moved = value.func.value if m.matches(value or one.node, _MOVE) else None  # type: ignore[union-attr]
        if value is None or one.node not in (value, moved):
            return f"{one.where} does more than to wrap the model"
        model = _class_calls.code_of(given.value)
        if moved is one.node:
            model += "." + _class_calls.code_of(value).removeprefix(_class_calls.code_of(one.node)).lstrip(".")
        elif not m.matches(given.value, _MOVE):
            model += self._move(model)
        wrapper = self._import(one.cell, "torch.nn.parallel", _ddp_ranks.DDP)
        self._exchange(one.cell, value, cst.parse_expression(f"{wrapper}({model})"))
        return None

    def _move(self, model: str) -> str:
        """Return the move to the device of the process that the model lacks where it is wrapped."""
        names = "|".join(map(re.escape, {model, str(self._wrapper.target)}))
        moves = re.compile(rf"^\s*(?:(?:{names})\s*=.*)?(?:{names})?(\.(?:to|cuda)\([^()\n]*\))", re.MULTILINE)
        here = self._wrapper.cell.number, self._wrapper.line
        lines = {(c.number, n): text for c in self._cells.history for n, text in enumerate(c.source.splitlines(), 1)}
        if moves.search("\n".join(text for at, text in lines.items() if at < here)):
            return ""
        later = moves.search("\n".join(text for at, text in lines.items() if at > here))
        return ".cuda()" if later is None else later[1]

    def _share_out(self) -> str | None:
        """Have each process take its part of the batches."""
        for one in self._loaders:
            sampler = self._import(one.cell, "torch.utils.data", "DistributedSampler")
            new = _shared_out(one, self._cells, self._dist, sampler)
            if isinstance(new, Refused):
                return new.reason
            self._exchange(one.cell, one.node, new)
        return None

    def _name_no_device(self) -> str | None:
        """Have `cuda:0` mean the device of this process."""
        for cell in self._cells.history:
            if "cuda:0" not in cell.source:
                continue
            parsed = self._read(cell)
            if isinstance(parsed, Refused):
                return parsed.reason
            strings = within(parsed.module, cst.SimpleString)
            for node in (one for one in strings if one.evaluated_value == "cuda:0"):
                self._exchange(cell, node, node.with_changes(value=node.value.replace("cuda:0", "cuda")))
        return None

    def _draw_anew(self) -> str | None:
        """Tell each shuffling loader the epoch, as its order is drawn from that."""
        shuffled = {one.target for one in self._loaders if _is_shuffled(one)}
        for loop in self._loops:
            path = dict(loop.stands_for).get(loop.loader, loop.loader)
            for cell in self._cells.history if path in shuffled else ():
                if (why := self._tell_epoch(cell, loop, path)) is not None:
                    return why
        return None

    def _tell_epoch(self, cell: Cell, loop: TrainingLoop, loader: str) -> str | None:
        if loop.function is None and cell.number != loop.cell:
            return None
        parsed = self._read(cell)
        if isinstance(parsed, Refused):
            return parsed.reason if cell.number == loop.cell else None
        for node in _outer_loops(parsed, loop, cell):
            if not isinstance(node, cst.For) or not isinstance(node.target, cst.Name):
                return f"line {parsed.lines_of(node)[0]} of {cell} repeats the loop without a number"
            if not isinstance(node.body, cst.IndentedBlock) or node.body in self._nodes.get(cell.number, {}):
                return f"line {parsed.lines_of(node)[0]} of {cell} repeats more than one loop at a time"
            told = rewriting.statements(f"{loader}.sampler.set_epoch({node.target.value})\n", parsed)
            self._exchange(cell, node.body, _first(told[0]))
        return None

    def _start(self) -> str | None:
        """Enter the process group before anything is put on a device."""
        first = next((cell for cell in self._cells.history if ("torch", "torch") in imports_in(cell.source)), None)
        if first is None:
            return "no cell imports torch by its name: the processes have to find each other after that"
        parsed = self._read(first)
        if isinstance(parsed, Refused):
            return parsed.reason
        start = f"torchrun --nproc-per-node={self._processes} program.py"
        group = f"{self._dist}.init_process_group()  # started by: {start}"
        top = ["import os", f"import torch.distributed as {self._dist}", *self._tops.get(first.number, [])]
        device = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
        self._tops[first.number] = [*top, f"\n{group}", device]
        return None

    def _read(self, cell: Cell) -> rewriting.ParsedCell | Refused:
        parsed = self._parsed.get(cell.number) or rewriting.read(cell.source)
        if isinstance(parsed, rewriting.ParsedCell):
            self._parsed[cell.number] = parsed
        return parsed


def _processes(others: Sequence[cst.Arg]) -> str | None:
    """Return how many processes to start, as torchrun takes it, None where that is not known."""
    if not others:
        return "gpu"
    if len(others) > 1 or (others[0].keyword is not None and others[0].keyword.value != "device_ids"):
        return None
    text = _class_calls.code_of(others[0].value)
    if _ALL.fullmatch(text) or text == "None":
        return "gpu"
    numbers = re.findall(r"\d+", text)
    is_first = re.fullmatch(r"[\[(][\d, ]+[\])]", text) and numbers == [str(n) for n in range(len(numbers))]
    return str(len(numbers)) if is_first else None


def _outer_loops(parsed: rewriting.ParsedCell, loop: TrainingLoop, cell: Cell) -> Iterator[cst.For | cst.While]:
    """Yield the loops that repeat ``loop``: the innermost around it, or around the calls of its function."""
    lines = [loop.line] if cell.number == loop.cell else []
    if loop.function is not None:
        called = re.compile(rf"(?<!def )\b{loop.function}\(")
        lines += [n for n, line in enumerate(cell.source.splitlines(), 1) if called.search(line.partition("#")[0])]
    seen: set[int] = set()
    for line in lines:
        around = [node for node in rewriting.path_to(parsed, line) if isinstance(node, cst.For | cst.While)]
        around = [node for node in around if parsed.lines_of(node)[0] != line]
        if around and id(around[-1]) not in seen:
            seen.add(id(around[-1]))
            yield around[-1]


def _first(told: cst.BaseStatement) -> New:
    def put(body: cst.CSTNode) -> cst.CSTNode:
        return body.with_changes(body=[told, *body.body])  # type: ignore[attr-defined]

    return put


def _loaders(cells: Cells, loops: tuple[TrainingLoop, ...]) -> tuple[_class_calls.Call, ...] | Refused:
    """Return the calls that make the loaders of these loops."""
    found = _class_calls.find(cells, "DataLoader")
    if isinstance(found, Refused):
        return found
    wanted = {dict(loop.stands_for).get(loop.loader, loop.loader) for loop in loops}
    made = {one.target: one for one in found if one.target in wanted}
    missing = sorted(wanted - made.keys())
    if missing or not wanted:
        return Refused(f"`{', '.join(missing)}` is no DataLoader of the cells, whose batches could be shared out")
    return tuple(made.values())


def _is_shuffled(one: _class_calls.Call) -> bool:
    """Whether the samples may come in another order in each epoch."""
    given = _class_calls.keyword(one.node, "shuffle")
    return given is not None and _class_calls.code_of(given) != "False"


def _shared_out(one: _class_calls.Call, cells: Cells, dist: str, sampler: str) -> cst.Call | Refused:
    """Return the call of a loader that takes its process' part of each batch.

    Args:
        dist: the name of ``torch.distributed``; ``sampler``: that of ``DistributedSampler``.
    """
    call = one.node
    names = [arg.keyword.value for arg in call.args if arg.keyword is not None]
    if any(arg.star for arg in call.args) or len(call.args) - len(names) > 2:
        return Refused(f"{one.where} gives the loader's settings in a way that is not followed")
    if (taken := next((name for name in _OTHERWISE if name in names), None)) is not None:
        return Refused(f"{one.where} gives the loader a `{taken}`, which would have to know of the processes")
    data = _argument(call, "dataset", 0)
    size = _argument(call, "batch_size", 1)
    if data is None or size is None:
        return Refused(f"{one.where} makes batches of one sample, which cannot be shared out")
    if not isinstance(data.value, cst.Name | cst.Attribute):
        return Refused(f"{one.where} makes the data set within the call: give it a name first")
    text = _class_calls.code_of(size.value)
    if not isinstance(size.value, cst.Name | cst.Attribute | cst.Integer):
        return Refused(f"`{text}` of {one.where} is no plain number of samples")
    if (where := _also_used(text, cells)) is not None:
        return Refused(f"`{text}` is the size of a batch elsewhere as well, in `{where}`")
    part = size.with_changes(value=cst.parse_expression(f"{text} // {dist}.get_world_size()"))
    call = call.with_changes(args=[part if arg is size else arg for arg in call.args])
    order = _class_calls.keyword(call, "shuffle")
    told = "False" if order is None else _class_calls.code_of(order)
    source = _class_calls.code_of(data.value)
    made = f"{sampler}({source})" if told == "True" else f"{sampler}({source}, shuffle={told})"
    if order is None:
        return _class_calls.with_keyword(call, "sampler", made)
    args = [
        arg.with_changes(keyword=cst.Name("sampler"), value=cst.parse_expression(made)) if arg.value is order else arg
        for arg in call.args
    ]
    return call.with_changes(args=args)


def _argument(call: cst.Call, name: str, at: int) -> cst.Arg | None:
    for index, arg in enumerate(call.args):
        if (arg.keyword is None and index == at) or (arg.keyword is not None and arg.keyword.value == name):
            return arg
    return None


def _also_used(name: str, cells: Cells) -> str | None:
    """Return the line that reads a size of batches for something else than a loader."""
    if name.isdigit():
        return None
    reads = re.compile(rf"(?<![\w.]){re.escape(name)}\b(?!\s*=(?!=))")
    for cell in cells.history:
        for line in cell.source.splitlines():
            code = line.partition("#")[0]
            if reads.search(re.sub(rf"\bbatch_size\s*=\s*{re.escape(name)}\b|DataLoader\([^)]*", "", code)):
                return line.strip()
    return None


FIX: Final = Fix(
    id="dp_to_ddp",
    title="Train in a process for each device instead of gathering on the first",
    effect=Effect.ADVICE,
    cost="a program that torchrun starts, in the place of a notebook",
    propose=propose,
    apply=None,
    patch=patch,
    guard=_ddp_ranks.never_applied,
)
