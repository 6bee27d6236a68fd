"""A recurrent state cut from the graphs of the steps before.

A state that goes from one step into the next with its graph keeps the activations of all steps. In a training loop it
is detached at the end of the step, which is truncated backpropagation through time: the values are the same, but
gradients no longer reach back into earlier steps. That is another result, so it is offered and never taken for granted.
It is exact only where evidence says that nothing is differentiated through the state, as in an evaluation loop.

In a module, the state is detached before it is fed back. Live, a hook does the same at the start of the module's
forward; it serves classes of earlier cells, which no redefinition would change for the objects that are there. Gradient
history that the state has lost when the context is left is not given back.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import libcst as cst

from oomdoctor.errors import OomDoctorError
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.memory import Role
from oomdoctor.model.sizes import format_size
from oomdoctor.program import rewriting
from oomdoctor.program.carried_state import carried_state
from oomdoctor.program.magics import parsed
from oomdoctor.program.sites import site
from oomdoctor.program.undifferentiated import undifferentiated

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cells, Session
    from oomdoctor.model.site import Site
    from oomdoctor.objects.known import Objects
    from oomdoctor.program.definitions import Program

__all__ = ["FIX", "apply", "detect", "patch", "propose"]

_NOTHING: Final = "no recurrent state is carried over steps with its graph"
_MAKES: Final = frozenset({"zeros", "ones", "randn", "rand", "empty", "zeros_like", "new_zeros", "tensor", "full"})
_LSTM: Final = re.compile(r"\bLSTM(?:Cell)?\(")
_ONE_STATE: Final = re.compile(r"\b(?:GRU|RNN)(?:Cell)?\(")


def detect(program: Program, objects: Objects) -> tuple[Site, ...]:
    """Find the state that is carried over steps: ``idle`` where nothing differentiates it, else ``carried``."""

    def idle() -> Collection[tuple[int, int]]:
        return [(cell, line) for cell, line, _ in undifferentiated(program, objects.kinds, objects.line)]

    found = carried_state(program, idle, trains=any(loop.in_failing_run for loop in objects.loops))
    if found is None:
        return ()
    return (site("idle" if found.is_idle else "carried", found.scope, found.node, found.names),)


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose it where a state is carried with its graph and graphs take memory."""
    found = evidence.code.first("detach_state")
    if found is None:
        return Refused(_NOTHING)
    names = found.names
    census = evidence.census
    kept = census.bytes_of(Role.ACTIVATION) + census.bytes_of(Role.GRAPH_KEPT_ALIVE)
    if not kept:
        return Refused(f"the census found no graphs that {_listed(names)} could keep alive")
    exact = found.kind == "idle"
    return (
        Proposal(
            dose=Dose.of(state=", ".join(names)),
            effect=Effect.EXACT if exact else Effect.CHANGES_RESULT,
            saves=kept,
            slowdown=1.0,
            basis=f"at most the {format_size(kept)} of activations and graphs that the census found: "
            f"what of it belongs to earlier steps hangs on {_listed(names)}",
            caveat=None
            if exact
            else f"gradients end at the step then: they no longer reach earlier steps through {_listed(names)} "
            "(truncated backpropagation through time)",
        ),
    )


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(f"`{name}`" for name in names)


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Detach the state at the end of the step; in a module, before it is fed back."""
    found = evidence.code.first("detach_state")
    if found is None:
        return Refused(_NOTHING)
    names = found.names
    cell = cells.get(found.cell)
    parsed = rewriting.read(cell.source)
    if isinstance(parsed, Refused):
        return parsed
    path = rewriting.path_to(parsed, found.line)
    feeding = path[-1] if path else None
    if not isinstance(feeding, cst.SimpleStatementLine) or len(feeding.body) > 1:
        return Refused(f"line {found.line} of {cell} is no statement of its own")
    in_module = all(name.startswith("self.") for name in names)
    is_idle = found.kind == "idle"
    module = _in_module(parsed, feeding, names, cells) if in_module else _in_loop(parsed, path, names, cells, is_idle)
    if isinstance(module, Refused):
        return module
    return rewriting.join(cells, [rewriting.edit(cells, cell, parsed, module)])


def _in_module(
    parsed: rewriting.ParsedCell, feeding: cst.SimpleStatementLine, names: tuple[str, ...], cells: Cells
) -> cst.Module | Refused:
    new = []
    for name in names:
        line = _detached((name,), cells)
        if isinstance(line, Refused):
            return line
        new.append(f"if {name} is not None:\n    {line}\n")
    before = rewriting.statements("".join(new), parsed)
    first = before[0].with_changes(leading_lines=feeding.leading_lines)
    return rewriting.replace(parsed.module, feeding, [first, *before[1:], feeding.with_changes(leading_lines=())])


def _in_loop(
    parsed: rewriting.ParsedCell,
    path: tuple[rewriting.Statement, ...],
    names: tuple[str, ...],
    cells: Cells,
    idly: bool,
) -> cst.Module | Refused:
    loops = [node for node in path if isinstance(node, cst.For | cst.While)]
    steps = loops if idly else [node for node in loops if ".backward(" in parsed.code(node)]
    if not steps or not isinstance(steps[-1].body, cst.IndentedBlock):
        return Refused("the loop that carries the state calls backward nowhere itself")
    loop = steps[-1]
    below = path[path.index(loop) + 1 :]
    if any(not isinstance(node, cst.For | cst.With | cst.SimpleStatementLine) for node in below):
        return Refused(f"{_listed(names)} is carried over under a condition")
    if _leaves_early(loop):
        return Refused("the loop has a `continue`, which would pass over the line that detaches the state")
    line = _detached(names, cells)
    if isinstance(line, Refused):
        return line
    why = "its graph is not needed" if idly else "gradients end with the step"
    added = rewriting.statements(f"{line}  # {why}\n", parsed)
    body = loop.body.with_changes(body=[*loop.body.body, *added])
    return rewriting.replace(parsed.module, loop.body, body)


def _leaves_early(loop: cst.For | cst.While) -> bool:
    """Whether a ``continue`` of the loop itself would pass over its end."""
    waiting: list[cst.CSTNode] = [loop.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, cst.Continue):
            return True
        waiting += [child for child in node.children if not isinstance(child, cst.For | cst.While | cst.FunctionDef)]
    return False


def _detached(names: tuple[str, ...], cells: Cells) -> str | Refused:
    """Return the assignment that detaches the names."""
    values = []
    for name in names:
        kind = "tensor" if len(names) > 1 else _kind(name, cells)
        if kind == "list":
            return Refused(f"`{name}` is a list of states: it is not known what is in it")
        parts = f"tuple(part.detach() for part in {name})"
        whole = f"{name}.detach()"
        values.append({"tensor": whole, "tuple": parts}.get(kind, f"{parts} if isinstance({name}, tuple) else {whole}"))
    return f"{', '.join(names)} = {', '.join(values)}"


def _kind(name: str, cells: Cells) -> str:
    """Return what the cells show ``name`` to be: a tensor, a tuple or a list of them; empty where they do not."""
    trees = [tree for cell in cells.history if (tree := parsed(cell.source)) is not None]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    kinds = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets):
            kinds.add(_kind_of(node.value, functions))
    known = kinds - {""}
    if len(known) == 1:
        return known.pop()
    text = "\n".join(cell.source for cell in cells.history)
    if not known and bool(_LSTM.search(text)) != bool(_ONE_STATE.search(text)):
        return "tuple" if _LSTM.search(text) else "tensor"
    return ""


def _kind_of(value: ast.expr, functions: dict[str, ast.FunctionDef], depth: int = 1) -> str:
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in {"to", "cuda"}:
        value = value.func.value
    if isinstance(value, ast.Tuple):
        return "tuple"
    if isinstance(value, ast.List | ast.ListComp):
        return "list"
    if isinstance(value, ast.Call):
        called = ast.unparse(value.func).rpartition(".")[2]
        if called in _MAKES:
            return "tensor"
        if called in functions and depth:
            given = [node.value for node in ast.walk(functions[called]) if isinstance(node, ast.Return)]
            kinds = {_kind_of(one, functions, depth - 1) for one in given if one is not None}
            return kinds.pop() if len(kinds) == 1 else ""
    return ""


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Detach the state of modules that keep it themselves at the start of each of their forwards; undone on exit.

    Raises:
        OomDoctorError: no module keeps the state in an attribute of that name.
    """
    names = [name.removeprefix("self.") for name in str(dose["state"]).split(", ") if name.startswith("self.")]
    parts = {id(part): part for _, root in session.modules for part in root.modules()}
    keepers = [part for part in parts.values() if names and all(name in vars(part) for name in names)]
    if not keepers:
        raise OomDoctorError(f"no module keeps {dose['state']}: the state is cut in the source alone")

    def cut(module: Any, _args: Any) -> None:
        for name in names:
            vars(module)[name] = _without_graph(vars(module)[name])

    with ExitStack() as stack:
        for part in keepers:
            stack.callback(part.register_forward_pre_hook(cut).remove)
        yield


def _without_graph(value: Any) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach() if value.grad_fn is not None else value
    if type(value) is tuple:
        return tuple(map(_without_graph, value))
    return value


FIX: Final = Fix(
    id="detach_state",
    title="Cut a recurrent state from the graphs of earlier steps",
    effect=Effect.EXACT,
    cost="nothing",
    propose=propose,
    apply=apply,
    patch=patch,
    detect=detect,
)
