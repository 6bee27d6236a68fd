"""A loader whose batches are shared out among processes: each of them takes its part of every batch."""

from __future__ import annotations

import re
from typing import Final

import libcst as cst

from oomdoctor.fixes import _class_calls
from oomdoctor.fixes._class_calls import with_keyword
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import TrainingLoop
from oomdoctor.model.session import Cells

__all__ = ["is_shuffled", "loaders", "shared_out"]

_OTHERWISE: Final = ("sampler", "batch_sampler")
"""What says already which samples come."""


def loaders(cells: Cells, loops: tuple[TrainingLoop, ...]) -> tuple[_class_calls.Call, ...] | Refused:
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


def is_shuffled(one: _class_calls.Call) -> bool:
    """Whether the samples may come in another order in each epoch."""
    given = _class_calls.keyword(one.node, "shuffle")
    return given is not None and _class_calls.code_of(given) != "False"


def shared_out(one: _class_calls.Call, cells: Cells, dist: str, sampler: str) -> cst.Call | Refused:
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
        return with_keyword(call, "sampler", made)
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
