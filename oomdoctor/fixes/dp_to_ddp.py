"""A process for each device in the place of ``nn.DataParallel``, whose first device holds more than the others.

DataParallel gathers the outputs of all devices on the first one. With ``DistributedDataParallel`` each device keeps its
own part. It is advice, since a notebook is one process: the patched cells are a program to be started by ``torchrun``,
in which each process takes its part of every batch. The patch is the plain case: one wrapped model, loaders made in the
cells for the training loops, and no device but the first named by its number.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

import libcst as cst
import libcst.matchers as m

from oomdoctor.fixes import _construction_sites, ddp_memory
from oomdoctor.fixes._construction_sites import keyword_text, preceded, with_keyword
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing
from oomdoctor.model import Cell, Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.memory import Census
from oomdoctor.model.sizes import format_size
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.names import imports_in
from oomdoctor.program.rewriting import New, exchange, text_of, within

_CAVEAT: Final = (
    "the cells then are a program that torchrun starts once for each device; every process prints and saves for "
    "itself, and where the samples do not come out even some are seen twice"
)
_NUMBERED: Final = re.compile(r"cuda:[1-9]|\bcuda\(\s*\d|\.to\(\s*\d|\bset_device\b|CUDA_VISIBLE_DEVICES|f[\"']cuda:")
_STARTS: Final = re.compile(r"\binit_process_group\b|\bDistributedDataParallel\b|\bnotebook_launcher\b|\bAccelerator\(")
_MOVE: Final = m.Call(func=m.Attribute(attr=m.Name("to") | m.Name("cuda")))
_DEVICES: Final = re.compile(
    r"((device_ids\s*=\s*)?(None|(list\()?range\(torch\.cuda\.device_count\(\)\)\)?|[\[(](?P<numbers>[\d, ]+)[\])]))?"
)
"""How the devices are named: not at all, or from the first on."""
_OTHERWISE: Final = ("sampler", "batch_sampler")
"""What says already which samples come."""


@proposing
def propose(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    """Propose it where the census found more passing tensors on the first device than on the others."""
    need(evidence.code.data_parallel, "no model is wrapped in nn.DataParallel")
    first, *others = [census for census in evidence.censuses if census.device.startswith("cuda")] or [evidence.census]
    if not first.device.endswith(":0") or (incident.device or first.device) != first.device:
        raise Unfit("it is not the first device that ran out, where DataParallel gathers the outputs")
    need(others, "one device is in use, so DataParallel gathers nothing there")
    most = max(map(_passing, others))
    more = need(max(_passing(first) - most, 0), f"{first.device} holds no more activations than the other devices")
    yield Proposal(
        effect=Effect.ADVICE,
        saves=more,
        basis=f"the census found {format_size(_passing(first))} of activations and batches on {first.device}, and "
        f"{format_size(most)} at most on another device",
        caveat=_CAVEAT,
    )


def _passing(census: Census) -> int:
    return census.bytes_of(Role.ACTIVATION) + census.bytes_of(Role.BATCH)


@refusing
def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells as a program with a process for each device."""
    for cell in cells.history:
        if (used := _STARTS.search(cell.source)) is not None:
            raise Unfit(f"the cells start processes already: `{used[0]}`")
        if (used := _NUMBERED.search(cell.source)) is not None:
            raise Unfit(f"`{used[0]}` names one device, where each process has to have its own")
    found = _construction_sites.find(cells, "DataParallel")
    if len(found) != 1 or found[0].target is None:
        raise Unfit("no cell wraps one model in DataParallel, under a name")
    loops = [loop for loop in evidence.code.loops if loop.in_failing_run]
    wanted = {loop: dict(loop.stands_for).get(loop.loader, loop.loader) for loop in loops}
    loaders = {one.target: one for one in _construction_sites.find(cells, "DataLoader")}
    missing = set(wanted.values()) - loaders.keys()
    if missing or not loops:
        names = ", ".join(sorted(missing))
        raise Unfit(f"`{names}` is no DataLoader of the cells, whose batches could be shared out")
    program = _Program(cells)
    processes = program.wrap(found[0])
    for path in dict.fromkeys(wanted.values()):
        program.share_out(loaders[path])
    program.name_no_device()
    for loop, path in wanted.items():
        if keyword_text(loaders[path].node, "shuffle") not in (None, "False"):
            program.tell_epoch(loop)
    return program.started(processes)


_PLACES: Final = ("dataset", "batch_size")
"""What stands first without its keyword. Source: ``DataLoader.__init__``."""


class _Program:
    """The changes of one program, cell by cell."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._dist = rewriting.fresh_name("dist", cells)
        self._nodes = defaultdict[int, dict[cst.CSTNode, New]](dict)
        self._imports = defaultdict[int, dict[str, None]](dict)

    def _import(self, cell: Cell, module: str, attribute: str) -> str:
        name = import_lines.name_for(module, attribute, self._cells, f"torch_{attribute}")
        self._imports[cell.number][import_lines.source_of(module, attribute, name)] = None
        return name

    def wrap(self, one: _construction_sites.Call) -> str:
        """Wrap the model for this process, on its device; return how many processes to start."""
        given, *others = one.node.args
        if given.star or (given.keyword and given.keyword.value != "module"):
            raise Unfit(f"{one.where} gives the model in a way that is not followed")
        devices = _DEVICES.fullmatch("".join(text_of(other).strip() for other in others))
        numbers = re.findall(r"\d+", (devices and devices["numbers"]) or "")
        if devices is None or numbers != [str(number) for number in range(len(numbers))]:
            raise Unfit(f"{one.where} names the devices in a way that is not followed")
        wrapper = self._import(one.cell, "torch.nn.parallel", ddp_memory.DDP)
        model = text_of(given.value)
        there = "" if m.matches(given.value, _MOVE) else self._move(one, model)
        self._nodes[one.cell.number][one.node] = cst.parse_expression(f"{wrapper}({model}{there})")
        return str(len(numbers) or "gpu")

    def _move(self, one: _construction_sites.Call, model: str) -> str:
        """Return the move to the device of the process that the model lacks where it is wrapped."""
        names = "|".join(map(re.escape, {model, str(one.target)}))
        moves = re.compile(rf"^\s*(?:(?:{names})\s*=.*)?(?:{names})?(\.(?:to|cuda)\([^()\n]*\))")
        for cell in self._cells.history:
            for number, line in enumerate(cell.source.splitlines(), 1):
                if (found := moves.search(line)) is not None:
                    return "" if (cell.number, number) < (one.cell.number, one.line) else found[1]
        return ".cuda()"

    def share_out(self, one: _construction_sites.Call) -> None:
        """Have each process take its part of the batches of a loader."""
        args = one.node.args
        unnamed = [arg for arg in args if arg.keyword is None]
        given = dict(zip(_PLACES, unnamed, strict=False)) | {arg.keyword.value: arg for arg in args if arg.keyword}
        if any(arg.star for arg in args) or len(unnamed) > len(_PLACES):
            raise Unfit(f"{one.where} gives the loader's settings in a way that is not followed")
        if (taken := next((name for name in _OTHERWISE if name in given), None)) is not None:
            raise Unfit(f"{one.where} gives the loader a `{taken}`, which would have to know of the processes")
        need(given.keys() >= {*_PLACES}, f"{one.where} makes batches of one sample, which cannot be shared out")
        data, size = (given[name].value for name in _PLACES)
        if not isinstance(data, cst.Name | cst.Attribute):
            raise Unfit(f"{one.where} makes the data set within the call: give it a name first")
        text, told, nodes = text_of(size), keyword_text(one.node, "shuffle"), self._nodes[one.cell.number]
        if not isinstance(size, cst.Name | cst.Attribute | cst.Integer):
            raise Unfit(f"`{text}` of {one.where} is no plain number of samples")
        sampler = self._import(one.cell, "torch.utils.data", "DistributedSampler")
        made = f"{sampler}({text_of(data)}{'' if told == 'True' else f', shuffle={told or False}'})"
        nodes[size] = cst.parse_expression(f"{text} // {self._dist}.get_world_size()")
        if (shuffle := given.get("shuffle")) is not None:
            nodes[shuffle] = shuffle.with_changes(keyword=cst.Name("sampler"), value=cst.parse_expression(made))
        else:
            nodes[one.node] = lambda call: with_keyword(cst.ensure_type(call, cst.Call), "sampler", made)

    def name_no_device(self) -> None:
        """Have `cuda:0` mean the device of this process."""
        for cell in (one for one in self._cells.history if "cuda:0" in one.source):
            for node in within(need(rewriting.read(cell.source)).module, cst.SimpleString):
                if node.evaluated_value == "cuda:0":
                    self._nodes[cell.number][node] = node.with_changes(value=node.value.replace("cuda:0", "cuda"))

    def tell_epoch(self, loop: TrainingLoop) -> None:
        """Tell a shuffling loader each time that another epoch begins, as its order is drawn from that."""
        parsed = need(rewriting.read(self._cells.get(loop.cell).source))
        old = need(rewriting.loop_at(parsed, loop.line), f"{loop.where} is not a loop that can be rewritten")
        line = f"{loop.loader}.sampler.set_epoch({loop.loader}.sampler.epoch + 1)\n"
        self._nodes[loop.cell][old] = preceded(old, line, parsed)

    def started(self, processes: str) -> Patch | Refused:
        """Return all changes, with the process group entered before anything is put on a device."""
        first = next((cell for cell in self._cells.history if ("torch", "torch") in imports_in(cell.source)), None)
        first = need(first, "no cell imports torch by its name: the processes have to find each other after that")
        group = f"{self._dist}.init_process_group()  # started by: torchrun --nproc-per-node={processes} program.py"
        tops = {number: list(texts) for number, texts in self._imports.items()}
        imports = ["import os", f"import torch.distributed as {self._dist}", *tops.get(first.number, [])]
        tops[first.number] = [*imports, f"\n{group}", 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))']
        edits = []
        for cell in (self._cells.get(number) for number in sorted({*self._nodes, *tops})):
            parsed = need(rewriting.read(cell.source))
            module = exchange(parsed.module, self._nodes[cell.number])
            module = import_lines.insert_at_top(parsed, module, tops.get(cell.number, []))
            edits.append(_construction_sites.advised(cell, parsed, module))
        return rewriting.join(self._cells, edits)


FIX: Final = Fix(
    id="dp_to_ddp",
    title="Replace DataParallel with one process per device (DDP)",
    effect=Effect.ADVICE,
    cost="a program that torchrun starts, in the place of a notebook",
    propose=propose,
    patch=patch,
)
