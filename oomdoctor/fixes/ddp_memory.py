"""What DistributedDataParallel holds twice in a process, and what it repeats in every process.

``ddp_settings``: DDP keeps a second copy of all gradients in its buckets. With ``gradient_as_bucket_view=True`` the
gradients are views of the buckets, and the exchange is the same to the bit. Programs that hold on to a gradient are
refused: as a view it changes with the next step.

``zero_optimizer``: ``ZeroRedundancyOptimizer`` gives each parameter to one process, which keeps the state for it, steps
it, and sends it to the others. The numbers are the same to the bit where the optimizer treats each element for itself;
others are refused. So is a program that reads or loads the optimizer's state, which no process has whole.

``fsdp2``: with ``fully_shard`` each process keeps its share of all that training keeps, and a block is gathered for as
long as it is used. It is advice: parameters become ``DTensor``, checkpoints hold shares, and every process has to be
started again. The patch is the plain case: one model that DDP wraps, its blocks, and an optimizer made afterwards.

A process that runs a cell again by itself would wait for the others without end: a retry in a single process of several
is refused, and made where all of them run again together.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final

import libcst as cst

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _construction_sites
from oomdoctor.fixes._preconditions import in_the_step, layer
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing
from oomdoctor.fixes.gradients import ELEMENTWISE
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role, Session
from oomdoctor.model.code import ModelFacts, ReplicaFacts
from oomdoctor.model.memory import LASTING
from oomdoctor.model.sizes import format_size
from oomdoctor.program import import_lines, rewriting, torch_functions
from oomdoctor.program.rewriting import text_of
from oomdoctor.program.torch_functions import Result

DDP: Final = "DistributedDataParallel"


def wrapped(evidence: Evidence) -> tuple[ReplicaFacts, ...]:
    """Return the models that DDP wraps, none where it is made in a function; Unfit where DDP is not in use."""
    code = evidence.code
    need(code.distributed is not None, f"no model is wrapped in {DDP}")
    need(code.distributed == DDP, f"{code.distributed} spreads the training, which has settings of its own")
    return tuple(one for one in code.replicas if one.type_name == DDP)


def shared_by(evidence: Evidence) -> int:
    """Return how many processes could each keep a share of what DDP repeats in all of them."""
    found = wrapped(evidence)
    why = "this process is in no process group, so nothing is known of others to share with"
    if (ranks := need(evidence.code.world_size, why)) == 1:
        raise Unfit("the process group has one process, so there is none to share with")
    if any(one.ranks not in (None, ranks) for one in found):
        raise Unfit("the model is trained by a part of the processes only, so whom to share with is not known")
    return ranks


@contextmanager
def alone(session: Session, dose: Dose) -> Iterator[None]:
    """Refuse, by an ``OomDoctorError``, to go on where other processes take part in the training."""
    distributed: Any = sys.modules.get("torch.distributed")
    is_shared = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if is_shared and (ranks := distributed.get_world_size()) > session.ranks:
        raise OomDoctorError(
            f"the training is shared by {ranks} processes, of which one cannot run the cell again on its own"
        )
    yield


_VIEW: Final = "gradient_as_bucket_view"
_PASSING: Final = re.compile(
    r"\.grad(\.data)?(\s*[-+*/]=|\.("
    rf"{'|'.join(sorted(torch_functions.names_of(Result.REDUCED, Result.DISCRETE)))}|abs|square|pow"
    r"|clone|numel|item|size|dim|element_size|shape|dtype|device|is_sparse|ndim)\b)|\.grad(\s*=(?!=)|\s+is\b|\()"
    r"|^\s*(if [^:\n]*: *)?[\w.\[\]]+\.grad(\.data)?\.(zero|mul|div|add|sub|clamp|copy|nan_to_num)_\(.*"
    r"|\b(isnan|isfinite|isinf|norm|vector_norm|is_tensor)\([\w.\[\]]+\.grad\b",
    re.MULTILINE,
)
"""What leaves nothing behind that shares the gradient's memory."""
_KEEPING: Final = re.compile(r"\S*\.grad\b|create_graph\s*=\s*(?!False)\w+")


@proposing
def _propose_views(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    found = wrapped(evidence)
    if found and all(one.bucket_views for one in found):
        raise Unfit("the gradients lie in the buckets already")
    why = "no gradient was held when the memory ran out, so the buckets are not a second copy"
    gradients = need(evidence.census.bytes_of(Role.GRADIENT), why)
    yield Proposal(
        dose=Dose.of(**{_VIEW: True}),
        effect=Effect.EXACT,
        saves=gradients,
        basis=f"the census found {format_size(gradients)} of gradients, of which the buckets are a second copy",
    )


@refusing
def _patch_views(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    found = need(_construction_sites.find(cells, DDP), f"no cell makes a {DDP}: it is made by a library")
    for cell in cells.history:
        code = re.sub(r"#.*", "", cell.source)
        if (kept := _KEEPING.search(_PASSING.sub("", code))) is not None:
            line = next(one.strip() for one in code.splitlines() if kept[0] in one)
            raise Unfit(f"`{line}` may hold on to a gradient, which as a view would change with the next step")
    known = {one.path for one in evidence.code.replicas}
    told = {one: _construction_sites.with_keyword(one.node, _VIEW, "True") for one in found}
    for one, text in ((one, _construction_sites.keyword_text(one.node, _VIEW)) for one in found):
        need(text in (None, "True", "False"), f"{one.where} takes `{_VIEW}` from `{text}`: set it there")
    live = dict[_construction_sites.Call, list[str]]()
    for one in (one for one in found if one.around is None and one.is_live(cells)):
        if one.target is None or one.target not in known:
            raise Unfit(f"{one.where} makes it before the failing cell, under no name that leads to it")
        model = next(arg.value for arg in told[one].args if arg.keyword is None or arg.keyword.value == "module")
        anew = told[one].deep_replace(model, cst.parse_expression(f"{one.target}.module"))
        live[one] = [f"{one.target} = {text_of(anew)}"]
    return _construction_sites.exchanged(cells, told, live=live)


_SHARDED: Final = "ZeroRedundancyOptimizer"
_OF_SHARDED: Final = "torch.distributed.optim"
_TWO_VALUES: Final = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "Adamax"})
"""Those that keep two values for each element."""
_WHOLE_STATE: Final = re.compile(r"(?P<name>[\w.\[\]'\"]+)\.(?P<use>state_dict|load_state_dict|state|share_memory)\b")
_OPTIMIZER: Final = re.compile(r"optim|opt\b", re.IGNORECASE)
_READABLE: Final = re.compile(r"[\w.\[\]]+\.parameters\(\)|(filter|list)\(|\[(?!\s*\w+\()")
_GROUPS: Final = re.compile(r"[\"']params[\"']:\s*(.*)")
_LISTED: Final = re.compile(r"list\(|\[")
_EQUAL: Final = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
_BROADCASTS: Final = 1.05
"""Time of a step that sends every parameter once more, as a ratio. A round figure, not measured."""

_HOME: Final = "torch.distributed.fsdp"
_SHARD: Final = "fully_shard"
_SINCE: Final = (2, 6)
"""The first torch that has it there. Source: release notes of PyTorch 2.6."""
_TRAFFIC: Final = 1.5
"""What is sent, as a ratio to DDP. Source: Rajbhandari et al., arXiv:1910.02054, section 7.2: 3Ψ in place of 2Ψ."""
_MAKES_OPTIMIZER: Final = re.compile(r"\boptim\.\w+\(|\b(Adam|AdamW|SGD|RMSprop|Adagrad|Adafactor)\(")
_OF_DDP: Final = re.compile(r"\.(module|no_sync|join|register_comm_hook)\b|\bZeroRedundancyOptimizer\b")
_CAVEAT: Final = (
    "`state_dict()` then holds the shares of one process (`torch.distributed.checkpoint.state_dict` gathers them), and "
    "the program has to be started again on every process"
)


@proposing
def _propose_zero(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    ranks, steppers = shared_by(evidence), evidence.code.steppers
    for one in steppers:
        need(one.type_name != _SHARDED, f"`{one.path}` shares its state among the processes already")
        if one.type_name not in ELEMENTWISE or not one.home.startswith("torch.optim."):
            raise Unfit(f"`{one.path}` is a {one.type_name}, which is not known to treat each element for itself")
    if any(len(one.dtypes) > 1 for one in evidence.code.replicas):
        raise Unfit("the parameters are of several types, which ZeroRedundancyOptimizer does not take")
    state, basis = _state(incident, evidence)
    need(state, "the census found no optimizer state on the device")
    share = max([1 / ranks, *(one.largest_bytes / one.parameter_bytes for one in steppers if one.parameter_bytes)])
    need(share < 1, "one parameter has all the state, and each parameter stays with one process")
    yield Proposal(
        effect=Effect.EXACT,
        saves=int(state * (1 - share)),
        slowdown=_BROADCASTS,
        basis=f"{basis}; each of {ranks} processes would keep about {share:.0%} of it",
    )


def _state(incident: Incident, evidence: Evidence) -> tuple[int, str]:
    """Return the bytes of state that each process holds or would hold, and how that is known."""
    found = evidence.census.bytes_of(Role.OPTIMIZER_STATE)
    twice = [one.parameter_bytes for one in evidence.code.steppers if one.type_name in _TWO_VALUES]
    making = 2 * sum(twice) if in_the_step(incident) else 0
    if making > found:
        return making, f"analytic estimate: the step that failed makes {format_size(making)} of state"
    return found, f"the census found {format_size(found)} of optimizer state"


@refusing
def _patch_zero(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    if any(_SHARDED in cell.source for cell in cells.history):
        raise Unfit("the cells share the state of an optimizer already")
    code = evidence.code
    names = {one.path for one in code.steppers}
    for loop in (one for one in code.loops if one.in_failing_run):
        names |= {dict(loop.stands_for).get(text, text) for text in loop.optimizers} | set(loop.optimizers)
    found = _construction_sites.find(cells, *ELEMENTWISE)
    # A cell may take ``optim`` from a cell that is not known.
    homes = {one: import_lines.qualified_name(cells, text_of(one.node.func)) for one in found}
    found = tuple(one for one, home in homes.items() if home.removeprefix("torch.") == f"optim.{one.name}")
    why = "no cell makes the optimizer from a class of torch under the name that it is stepped by"
    found = need(tuple(one for one in found if not names or one.target in names), why)
    targets = {one.target for one in found if one.target}
    for use in (match for cell in cells.history for match in _WHOLE_STATE.finditer(cell.source)):
        if use["name"] in targets or _OPTIMIZER.search(use["name"]):
            text = use[0] if use["use"] == "state" else f"{use[0]}()"
            raise Unfit(f"`{text}` needs the whole state of the optimizer, which no process has then")
    name = import_lines.name_for(_OF_SHARDED, _SHARDED, cells, "SharedOptimizer")
    shared = {one: _within(one, name) for one in found}
    return _construction_sites.exchanged(cells, shared, [import_lines.source_of(_OF_SHARDED, _SHARDED, name)])


def _within(one: _construction_sites.Call, name: str) -> cst.Call:
    """Return the call that makes the same optimizer for a share of the parameters, whose groups it reads twice."""
    call = one.node
    if any(arg.star for arg in call.args):
        raise Unfit(f"{one.where} unpacks the optimizer's settings, of which some may not be passed on by name")
    unnamed = [arg for arg in call.args if arg.keyword is None]
    if len(unnamed) > 2 or not call.args or (call.args[0].keyword and call.args[0].keyword.value != "params"):
        raise Unfit(f"{one.where} gives the optimizer's settings by position")
    given = text_of(call.args[0].value)
    if given.isidentifier():
        made = re.findall(rf"^[ \t]*{given} = (.*(?:\n[ \t]+.*|\n\].*)*)", one.cell.source, re.MULTILINE)
        given = made[0] if len(made) == 1 else ""
    if not _READABLE.match(given) or not all(map(_LISTED.match, _GROUPS.findall(given))):
        raise Unfit(f"{one.where} gives groups of parameters that may be readable once only, which would be lost")
    if len(unnamed) == 2:
        rate = unnamed[1].with_changes(keyword=cst.Name("lr"), equal=_EQUAL)
        call = call.with_changes(args=[call.args[0], rate, *call.args[2:]])
    first = call.args[0].keyword.value if call.args[0].keyword is not None else ""
    added = _construction_sites.with_keyword(call, "optimizer_class", text_of(call.func), first)
    return added.with_changes(func=cst.Name(name))


@proposing
def _propose_fsdp(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    ranks = shared_by(evidence)
    numbers = re.findall(r"\d+", version("torch"))[:2]
    need(tuple(map(int, numbers)) >= _SINCE, "this torch has no `fully_shard`, which came with 2.6")
    model, kept = _model(evidence), sum(map(evidence.census.bytes_of, LASTING))
    need(kept, "the census found no parameters, gradients or optimizer state on the device")
    coupled = ", and buffers (running statistics) are no longer those of the first process" if model.batch_norm else ""
    yield Proposal(
        effect=Effect.ADVICE,
        saves=int(kept * (1 - 1 / ranks)),
        slowdown=_TRAFFIC,
        basis=f"estimate: each of {ranks} processes keeps its share of {format_size(kept)} of parameters, "
        "gradients and state; the blocks that are gathered at a time come on top",
        caveat=_CAVEAT + coupled,
    )


def _model(evidence: Evidence) -> ModelFacts:
    paths = {one.path for one in wrapped(evidence)}
    found = [one for one in evidence.code.models if one.path in paths]
    need(len(found) == 1, "there is not one model, known by its name, that DDP wraps")
    if not any(path.startswith("module.") or path == "module" for path in found[0].blocks):
        raise Unfit("the model has no repeated blocks, and sharded as one piece it would be gathered as one")
    return found[0]


@refusing
def _patch_fsdp(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    need(not any(_SHARD in cell.source for cell in cells.history), "the cells shard a model already")
    model, found = _model(evidence), _construction_sites.find(cells, DDP)
    if len(found) != 1 or found[0].target != model.path or found[0].around is not None:
        raise Unfit(f"no cell wraps `{model.path}` in DDP at its top level, in a statement of its own")
    (one,) = found
    for cell in cells.history:
        if (match := _OF_DDP.search(cell.source)) is not None:
            raise Unfit(f"`{match[0].lstrip('.')}` of {cell} belongs to DDP, and a sharded model has no such thing")
        for number, line in enumerate(cell.source.splitlines(), 1):
            is_before = (cell.number, number) < (one.cell.number, one.line)
            if is_before and _MAKES_OPTIMIZER.search(line.partition("#")[0]):
                raise Unfit(f"line {number} of {cell} makes an optimizer before the model is sharded")
    if evidence.device.name.startswith("cuda") and not any("set_device" in cell.source for cell in cells.history):
        raise Unfit("no cell chooses this process' device with `torch.cuda.set_device`, which says where the shares go")
    return _sharded(cells, one, model)


def _sharded(cells: Cells, one: _construction_sites.Call, model: ModelFacts) -> Patch | Refused:
    old = one.statement
    if not one.node.args or not isinstance(old, cst.SimpleStatementLine) or old.body[0].value is not one.node:  # type: ignore[attr-defined]
        raise Unfit(f"{one.where} does more than to wrap the model")
    shard = import_lines.name_for(_HOME, _SHARD, cells, "shard")
    block = rewriting.fresh_name("block", cells)
    text = text_of(one.node.args[0].value)
    lines = [] if text == model.path else [f"{model.path} = {text}"]
    outermost = (path for path in model.blocks if not any(path.startswith(f"{one}.") for one in model.blocks))
    for path in outermost:  # without the wrapper, whose own name is the model's then
        lines += [f"for {block} in {layer(model, path.partition('.')[2])}:", f"    {shard}({block})"]
    new = list(rewriting.statements("\n".join([*lines, f"{shard}({model.path})"]) + "\n", one.parsed))
    new[0] = new[0].with_changes(leading_lines=old.leading_lines)
    if old.trailing_whitespace.comment is not None:
        new[-1] = new[-1].with_changes(trailing_whitespace=old.trailing_whitespace)
    module = rewriting.replace(one.parsed.module, old, new)
    module = import_lines.insert_at_top(one.parsed, module, [import_lines.source_of(_HOME, _SHARD, shard)])
    return rewriting.join(cells, [_construction_sites.advised(one.cell, one.parsed, module)])


FIXES: Final = (
    Fix(
        id="ddp_settings",
        title="Keep gradients as views of DDP's buckets",
        effect=Effect.EXACT,
        frees=(Role.GRADIENT,),
        cost="nothing",
        propose=_propose_views,
        patch=_patch_views,
        guard=alone,
        is_tried=False,
    ),
    Fix(
        id="zero_optimizer",
        title="Shard optimizer state across processes (ZeRO)",
        effect=Effect.EXACT,
        frees=(Role.OPTIMIZER_STATE,),
        cost="every parameter is sent once more in each step",
        propose=_propose_zero,
        patch=_patch_zero,
        guard=alone,
        is_tried=False,
    ),
    Fix(
        id="fsdp2",
        title="Shard the model across processes (FSDP2)",
        effect=Effect.ADVICE,
        frees=LASTING,
        cost="half as much again to send, and checkpoints that hold shares",
        propose=_propose_fsdp,
        patch=_patch_fsdp,
    ),
)
