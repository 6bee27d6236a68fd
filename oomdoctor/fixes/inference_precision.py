"""Weights of fewer bits where a model is run for its results alone: 16 bits, or 8 for linear layers on the CPU.

``half_weights``: in bfloat16, or float16 where the device has no bfloat16, weights and activations take half the
memory. What the model is given is cast too where it was seen to be floating point. ``dynamic_quantization`` keeps the
weights of ``nn.Linear`` as int8 with a scale, a quarter of the memory, most often faster on a CPU, the only place where
its kernels run; where torch no longer has it, nothing is proposed. Training needs the small updates that few bits lose:
a cell that trains is refused. There is no live form: weights that were rounded do not come back by themselves.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import libcst as cst

from oomdoctor.fixes._preconditions import native
from oomdoctor.fixes._refusals import Unfit, need, proposing, refusing, root_of
from oomdoctor.fixes.gradients import tell_watchers
from oomdoctor.model import Cells, Dose, Effect, Evidence, Fix, Incident, Patch, Proposal, Refused, Role, Session, Site
from oomdoctor.model.code import CodeFacts
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.known import Objects
from oomdoctor.program import rewriting, torch_functions
from oomdoctor.program.arguments import called_on
from oomdoctor.program.dataflow import Flow, bound
from oomdoctor.program.definitions import Program, site, with_gradients
from oomdoctor.program.gradients import ModelCalls
from oomdoctor.program.import_lines import insert_at_top, knows_torch
from oomdoctor.program.names import own_nodes
from oomdoctor.program.rewriting import text_of, within
from oomdoctor.program.torch_functions import Result

_CASTS: Final = re.compile(r"\.half\(\)|\.bfloat16\(\)|torch\.(bfloat16|float16|half)\b")
_MAY_BE_TENSORS: Final = (cst.Name, cst.Attribute, cst.Subscript, cst.Call, cst.BinaryOperation, cst.UnaryOperation)
_CONSTANTS: Final = (cst.BaseNumber, cst.BaseString)
_NO_FLOATS: Final = torch_functions.names_of(Result.NUMBER, Result.DISCRETE, Result.TRUNCATED, Result.NEW) | {
    "float",
    "double",
}
"""Calls that give no tensor of 16 bits, whatever they are given."""
_DIGITS: Final = {"bfloat16": 8, "float16": 11}
_TRAINS: Final = {
    "half_weights": "the failing cell trains, and small updates would be lost in weights of 16 bits",
    "dynamic_quantization": "the failing cell trains, and weights of 8 bits cannot be trained",
}
_NO_RUN: Final = "no call of a model of the notebook was found in what the failing cell runs"


def detect_runs(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the calls of models in what the failing cell runs, and where something of their results goes to NumPy.

    A call is a ``prediction`` where the text around it turns gradients off, else a ``run``.
    """
    return tuple(_runs(program, ModelCalls(program, objects.kinds), objects))


def _runs(program: Program, models: ModelCalls, objects: Objects) -> Iterator[Site]:
    known = dict(objects.modules)
    for scope in program.running:

        def path_of(call: ast.Call, scope: Any = scope) -> str | None:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "generate":
                call = ast.Call(func=call.func.value, args=[], keywords=[])
            path = models.path(scope, call)
            if scope.owner and path is not None and path.startswith("self."):
                path = next((one for one in known if one.endswith(path.removeprefix("self"))), None)
            return path if path in known else None

        flow = Flow(
            makes=lambda call: torch_functions.last_name(call) != "generate" and path_of(call) is not None,
            stops=lambda call: torch_functions.last_name(call) in _NO_FLOATS,
            of_graphs=False,
        )
        names = flow.spread(scope.body, ())
        trained = set[int]() if scope.disables_grad else set(map(id, with_gradients(scope.body)))
        for node in (one for one in own_nodes(scope.body) if isinstance(one, ast.Call)):
            if (path := path_of(node)) is not None:
                yield site("run" if id(node) in trained else "prediction", scope, node, (path, ast.unparse(node.func)))
            elif torch_functions.last_name(node) == "numpy" and flow.carries(node.func, names):
                yield site("numpy", scope, node, (ast.unparse(node.func),))


def _check_not_training(fix: str, code: CodeFacts) -> None:
    if any(loop.in_failing_run for loop in code.loops):
        raise Unfit(_TRAINS[fix])
    need(code.grad_disabled, "the failing line does not run under no_grad or inference_mode, so it may be training")


@proposing
def _propose_half(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    code, census = evidence.code, evidence.census
    _check_not_training("half_weights", code)
    if code.half_weights or code.autocast:
        raise Unfit("the model computes in 16 bits already")
    need(code.models, "no model was found among the notebook's objects")
    weights, passing = census.bytes_of(Role.PARAMETER), census.bytes_of(Role.ACTIVATION)
    need(weights, f"the census found no weights on {census.device}")
    dtype = need(native(evidence))
    yield Proposal(
        dose=Dose.of(dtype=dtype),
        effect=Effect.CHANGES_RESULT,
        saves=(weights + passing) // 2,
        basis=f"half of {format_size(weights)} of weights and {format_size(passing)} of activations in the census",
        caveat=f"weights and results are rounded to {dtype}, {_DIGITS[dtype]} significant bits in place of 24, and "
        "the weights stay so",
    )


@proposing
def _propose_quantized(incident: Incident, evidence: Evidence) -> Iterator[Proposal]:
    code = evidence.code
    if any(loop.in_failing_run for loop in code.loops):
        raise Unfit(_TRAINS["dynamic_quantization"])
    if evidence.device.tensor_device != "cpu" or evidence.device.simulated:
        raise Unfit("the kernels of dynamic quantization run on the CPU alone")
    _check_not_training("dynamic_quantization", code)
    need(not code.half_weights, "the weights take 2 bytes each already, and are quantized from 4")
    linear = sum(model.linear_bytes for model in code.models)
    need(linear, "no model with linear layers was found among the notebook's objects")
    spec = find_spec("torch.ao.quantization.quantize")
    need(spec, "this torch has no dynamic quantization: it has moved to torchao")
    yield Proposal(
        dose=Dose.of(dtype="qint8"),
        effect=Effect.CHANGES_RESULT,
        saves=linear * 3 // 4,
        basis=f"analytic estimate: 1 byte in place of 4 for each of {format_size(linear)} of linear layers",
        caveat="weights of linear layers, and what goes into them, are rounded to 8 bits, and the weights stay so",
    )


@refusing
def _patch_half(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    dtype, found = str(dose["dtype"]), _found("half_weights", evidence.code)
    touched = {one.cell: cells.get(one.cell) for one in found}
    for cell in touched.values():
        need(not _CASTS.search(cell.source), f"{cell} chooses the precision already")
    for cell in (touched | {cells.failing.number: cells.failing}).values():
        if not knows_torch(cells.beside(cell)):
            raise Unfit(f"{'the cells do' if cell.file is None else f'{cell} does'} not import `torch` by its name")

    def change(call: cst.Call, one: Site) -> dict[cst.CSTNode, rewriting.New]:
        if one.kind == "numpy":  # NumPy has no bfloat16
            of = cst.ensure_type(call.func, cst.Attribute).value
            return {of: partial(called_on, call=".float()")} if dtype == "bfloat16" else {}
        if any(arg.star for arg in call.args):
            raise Unfit(f"what `{text_of(call)}` unpacks would have to be cast, one by one")
        floating = [arg.value for arg in call.args if _is_floating(arg.value, evidence)]
        return dict.fromkeys(floating, partial(called_on, call=f".to(torch.{dtype})"))

    return _written(cells, found, lambda path: f"{path}.to(torch.{dtype})", change)


@refusing
def _patch_quantized(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    need(not any("quantiz" in cell.source for cell in cells.history), "the cells have to do with quantization already")
    need(knows_torch(cells), "the cells do not import `torch` by its name")
    found = _found("dynamic_quantization", evidence.code)
    for model in (one for run in found for one in evidence.code.models if one.path == run.names[0]):
        need(model.type_name != "Linear", f"`{model.path}` is one layer, which cannot be exchanged in place")
        need(model.linear_bytes, f"`{model.path}` has no linear layers")
    call = "torch.ao.quantization.quantize_dynamic({}, {{torch.nn.Linear}}, dtype=torch.qint8, inplace=True)"
    return _written(cells, found, call.format, lambda *_: {})


def _found(fix: str, code: CodeFacts) -> tuple[Site, ...]:
    if any(loop.in_failing_run for loop in code.loops):
        raise Unfit(_TRAINS[fix])
    found = code.sites.get("half_weights", ())
    need([one for one in found if one.kind != "numpy"], _NO_RUN)
    return found


def _is_floating(node: cst.BaseExpression, evidence: Evidence) -> bool:
    """Tell whether an argument is a floating-point tensor, by what the census saw; another object fails loudly."""
    text = text_of(node)
    if isinstance(node, _CONSTANTS) or text in {"None", "True", "False"}:
        return False
    if not isinstance(node, _MAY_BE_TENSORS):
        raise Unfit(f"the model is given `{text}`, which is no tensor")
    names = {part.value for part in (node, *within(node, cst.Name)) if isinstance(part, cst.Name)}
    typed = [held for held in evidence.census.holdings if held.dtype]
    # In a loop that does not train, the census does not know the batch from other tensors of the user's.
    seen = [held for held in typed if root_of(held.path.removeprefix("local `")) in names]
    seen = seen or [held for held in typed if held.role is Role.BATCH]
    kinds = {str(held.dtype).removeprefix("torch.").startswith(("float", "bfloat")) for held in seen}
    need(len(kinds) == 1, f"of which type `{text}` is was not seen")
    return kinds.pop()


def _written(
    cells: Cells,
    found: Sequence[Site],
    line_of: Callable[[str], str],
    change: Callable[[cst.Call, Site], dict[cst.CSTNode, rewriting.New]],
) -> Patch | Refused:
    """Return the cells with these calls changed, and a line for each model in the failing cell before it is run."""
    edits, failing = [], cells.failing.number
    for number in sorted({failing, *(one.cell for one in found)}):
        parsed = need(rewriting.read(cells.get(number).source))
        changes: dict[cst.CSTNode, rewriting.New] = {}
        for one in (one for one in found if one.cell == number):
            calls = (call for call in within(parsed.module, cst.Call) if parsed.lines_of(call)[0] == one.line)
            call = next((call for call in calls if ast.unparse(ast.parse(text_of(call.func))) == one.names[-1]), None)
            changes |= change(need(call, f"`{one.names[-1]}` was not found again"), one)
        module = rewriting.exchange(parsed.module, changes)
        if number == failing:
            paths = dict.fromkeys(one.names[0] for one in found if one.kind != "numpy")
            module = _preceded(parsed, module, {path: line_of(path) for path in paths})
        edits.append(rewriting.edit(cells, cells.get(number), parsed, module))
    return rewriting.join(cells, edits)


def _preceded(parsed: rewriting.ParsedCell, module: cst.Module, lines: dict[str, str]) -> cst.Module:
    """Return ``module`` with a line for each model at its top, or where it is bound there."""
    body, top = list(module.body), list[str]()
    for path, line in reversed(lines.items()):
        at = [i for i, node in enumerate(parsed.tree.body) if re.split(r"\W", path)[0] in bound(node)]
        if at:
            body[at[-1] + 1 : at[-1] + 1] = rewriting.statements(line + "\n", parsed)
        else:
            top.insert(0, line)
    return insert_at_top(parsed, module.with_changes(body=body), top)


@contextmanager
def _guard(session: Session, dose: Dose) -> Iterator[None]:
    """Have the weights kept before the patched cell casts them, so that a retry that fails can put them back."""
    from torch import nn, optim

    from oomdoctor.fixes._forward import is_dry_run

    original: Callable[..., nn.Module] = nn.Module._apply
    is_due = not is_dry_run()

    def apply(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        nonlocal is_due
        if is_due and (parameters := list(module.parameters())):
            is_due = False
            tell_watchers(optim.Optimizer(parameters, {}))
        return original(module, *args, **kwargs)

    nn.Module._apply = apply  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


FIXES: Final = (
    Fix(
        id="half_weights",
        title="Hold weights in 16 bits for inference",
        effect=Effect.CHANGES_RESULT,
        frees=(Role.PARAMETER,),
        cost="results rounded to 16 bits",
        propose=_propose_half,
        patch=_patch_half,
        detect=detect_runs,
        guard=_guard,
    ),
    Fix(
        id="dynamic_quantization",
        title="Quantize linear layers to 8 bits for inference on the CPU",
        effect=Effect.CHANGES_RESULT,
        frees=(Role.PARAMETER,),
        cost="results rounded to 8 bits; most often faster on a CPU",
        propose=_propose_quantized,
        patch=_patch_quantized,
    ),
)
