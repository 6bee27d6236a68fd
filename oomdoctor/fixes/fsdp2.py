"""Shards parameters, gradients and optimizer state over the processes, block by block, in the place of DDP.

With ``torch.distributed.fsdp.fully_shard`` each process keeps its share of everything that training keeps, and a block
is gathered whole for as long as it is used. It is advice: parameters become ``DTensor``, which changes what a
checkpoint holds and what code that looks at weights finds, and the program has to be started again on every process.
The patch is the plain case: one model that DDP wraps, its repeated blocks, and an optimizer that is made afterwards.

Numbers are those of DDP up to the order of sums: the gradients are reduced in other pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

import libcst as cst

from oomdoctor.fixes import _class_calls, _ddp_ranks
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import ModelFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Edit, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.kinds import child_path
from oomdoctor.program import import_lines, rewriting

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells

__all__ = ["FIX", "patch", "propose"]

_HOME: Final = "torch.distributed.fsdp"
_SHARD: Final = "fully_shard"
_SINCE: Final = (2, 6)
"""The first torch that has it there. Source: release notes of PyTorch 2.6."""
_TRAFFIC: Final = 1.5
"""What is sent, as a ratio to DDP. Source: Rajbhandari et al., arXiv:1910.02054, section 7.2: 3Ψ in place of 2Ψ."""
_SHARDED: Final = (Role.PARAMETER, Role.GRADIENT, Role.OPTIMIZER_STATE)
_OPTIMIZERS: Final = re.compile(r"\boptim\.\w+\(|\b(Adam|AdamW|SGD|RMSprop|Adagrad|Adafactor)\(")
_OF_DDP: Final = re.compile(r"\.(module|no_sync|join|register_comm_hook)\b|\bZeroRedundancyOptimizer\b")
_CAVEAT: Final = (
    "`state_dict()` then holds the shares of one process (`torch.distributed.checkpoint.state_dict` gathers them), and "
    "the program has to be started again on every process"
)


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where a model with repeated blocks is repeated in several processes."""
    del incident
    ranks = _ddp_ranks.shared_by(evidence)
    if isinstance(ranks, Refused):
        return ranks
    if (why := _too_old()) is not None:
        return Refused(why)
    model = _model(evidence)
    if isinstance(model, Refused):
        return model
    kept = sum(map(evidence.census.bytes_of, _SHARDED))
    if not kept:
        return Refused("the census found no parameters, gradients or optimizer state on the device")
    coupled = ", and buffers (running statistics) are no longer those of the first process" if model.batch_norm else ""
    return (
        Proposal(
            dose=Dose(),
            effect=Effect.ADVICE,
            saves=int(kept * (1 - 1 / ranks)),
            slowdown=_TRAFFIC,
            basis=f"estimate: each of {ranks} processes keeps its share of {format_size(kept)} of parameters, "
            "gradients and state; the blocks that are gathered at a time come on top",
            caveat=_CAVEAT + coupled,
        ),
    )


def _too_old() -> str | None:
    try:
        numbers = re.findall(r"\d+", version("torch"))[:2]
    except PackageNotFoundError:
        return None
    return None if tuple(map(int, numbers)) >= _SINCE else "this torch has no `fully_shard`, which came with 2.6"


def _model(evidence: Evidence) -> ModelFacts | Refused:
    """Return the one model that DDP wraps, with its repeated blocks."""
    paths = {one.path for one in evidence.code.replicas if one.type_name == _ddp_ranks.DDP}
    found = [one for one in evidence.code.models if one.path in paths]
    if len(found) != 1:
        return Refused("there is not one model, known by its name, that DDP wraps")
    if not any(path.startswith("module.") or path == "module" for path in found[0].blocks):
        return Refused("the model has no repeated blocks, and sharded as one piece it would be gathered as one")
    return found[0]


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Return the cells with the model sharded in the place of the wrapper."""
    del dose
    if any(_SHARD in cell.source for cell in cells.history):
        return Refused("the cells shard a model already")
    model = _model(evidence)
    if isinstance(model, Refused):
        return model
    found = _class_calls.find(cells, _ddp_ranks.DDP)
    if isinstance(found, Refused):
        return found
    if len(found) != 1 or found[0].target != model.path or found[0].around is not None:
        return Refused(f"no cell wraps `{model.path}` in DDP at its top level, in a statement of its own")
    if (why := _why_not(cells, evidence, found[0])) is not None:
        return Refused(why)
    return _sharded(cells, found[0], model)


def _why_not(cells: Cells, evidence: Evidence, one: _class_calls.Call) -> str | None:
    for cell in cells.history:
        if (match := _OF_DDP.search(cell.source)) is not None:
            name = match[0].lstrip(".")
            return f"`{name}` of {cell} belongs to DDP, and a sharded model has no such thing"
        for number, line in enumerate(cell.source.splitlines(), 1):
            is_before = (cell.number, number) < (one.cell.number, one.line)
            if is_before and _OPTIMIZERS.search(line.partition("#")[0]):
                return f"line {number} of {cell} makes an optimizer before the model is sharded"
    is_set = any("set_device" in cell.source for cell in cells.history)
    if evidence.device.name.startswith("cuda") and not is_set:
        return "no cell chooses this process' device with `torch.cuda.set_device`, which says where the shares go"
    return None


def _sharded(cells: Cells, one: _class_calls.Call, model: ModelFacts) -> Patch | Refused:
    given = next((arg.value for arg in one.node.args if arg.keyword is None or arg.keyword.value == "module"), None)
    if given is None or not _is_whole_value(one):
        return Refused(f"{one.where} does more than to wrap the model")
    shard = import_lines.name_for(_HOME, _SHARD, cells, "shard")
    block = rewriting.fresh_name("block", cells)
    text = _class_calls.code_of(given)
    lines = [] if text == model.path else [f"{model.path} = {text}"]
    for path in _outermost(model):
        lines += [f"for {block} in {path}:", f"    {shard}({block})"]
    lines.append(f"{shard}({model.path})")
    new = list(rewriting.statements("\n".join(lines) + "\n", one.parsed))
    lead = getattr(one.statement, "leading_lines", ())
    tail = getattr(one.statement, "trailing_whitespace", None)
    new[0] = new[0].with_changes(leading_lines=lead)
    if tail is not None and tail.comment is not None:
        new[-1] = new[-1].with_changes(trailing_whitespace=tail)
    module = rewriting.replace(one.parsed.module, one.statement, new)
    imported = import_lines.source_of(_HOME, _SHARD, shard)
    after = rewriting.write(one.parsed, import_lines.insert_at_top(one.parsed, module, [imported]))
    if isinstance(after, Refused):
        return after
    # Advice is never run: what would be run for it is the whole cell.
    return Patch(edits=(Edit(cell=one.cell.number, before=one.cell.source, after=after, replay=after),))


def _is_whole_value(one: _class_calls.Call) -> bool:
    """Whether the statement assigns the wrapper and nothing else of it."""
    statement = one.statement
    return isinstance(statement, cst.SimpleStatementLine) and getattr(statement.body[0], "value", None) is one.node


def _outermost(model: ModelFacts) -> Iterator[str]:
    """Yield the expressions for the containers of repeated blocks that stand in no other one."""
    kept: list[str] = []
    for path in model.blocks:
        if not any(path.startswith(f"{outer}.") for outer in kept):
            kept.append(path)
            expression = model.path
            for name in path.split(".")[1:]:
                expression = child_path(expression, name)
            yield expression


FIX: Final = Fix(
    id="fsdp2",
    title="Shard the model over the processes, block by block",
    effect=Effect.ADVICE,
    cost="half as much again to send, and checkpoints that hold shares",
    propose=propose,
    apply=None,
    patch=patch,
    guard=_ddp_ranks.never_applied,
)
