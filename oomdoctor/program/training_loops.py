"""Training loops as the AST shows them: what they iterate over, what they call, and in which order.

A loop trains if ``backward`` is called in it, directly or in a function that it calls. Roles are told by the objects
of the namespace where a name leads to one, and by custom (``optimizer``, ``scheduler``) where none does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from oomdoctor.model.code import TrainingLoop
from oomdoctor.program import torch_functions
from oomdoctor.program.definitions import Program, Scope, imports_library
from oomdoctor.program.magics import Definition, Loop
from oomdoctor.program.names import call_name, loaded, own_nodes, target_names
from oomdoctor.program.regions import Region

_BARS: Final = frozenset({"enumerate", "tqdm", "tqdm_notebook", "notebook_tqdm", "auto_tqdm", "track", "progress_bar"})
"""They take the first batch as soon as they begin; ``zip``, ``iter`` and libraries may draw random numbers before."""
_WRAPPERS: Final = _BARS | {"log_every", "iter", "zip"}
_CLIPS: Final = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "unscale_")
_MOVES: Final = frozenset({"to", "cuda", "train"})
_SCHEDULER: Final = re.compile(r"sched|warmup|lr_", re.IGNORECASE)
_MODEL: Final = re.compile(
    r"^(?!(load|save|build|create|get|make|eval|evaluate|train|test|init|print|plot|optimi[sz]e|update)_)(self\.)?(\w*model|\w*net|\w*encoder|\w*decoder|generator|discriminator|vae|net[A-Z])$"
)
_GIVEN_LOSS: Final = re.compile(r"accelerator|(^|\.)(fabric|opt|\w*optim\w*|\w+_opt)$", re.IGNORECASE)
_DRAWS: Final = re.compile(
    r"^((torch|np|numpy|random)\.|np\.random\.|numpy\.random\.|torch\.distributions\.)?"
    rf"({'|'.join(sorted(torch_functions.DRAWS))}|random|choice|shuffle|uniform|rsample|sample)$"
)


class _Roles(NamedTuple):
    kinds: Mapping[str, str]
    stands_for: Mapping[str, str]

    def of(self, text: str) -> str | None:
        return self.kinds.get(self.stands_for.get(text, text))


_NO_ROLES: Final = _Roles({}, {})


def training_loops(
    program: Program, kinds: Mapping[str, str], line: int | None = None, running: Collection[tuple[int, int]] = ()
) -> tuple[TrainingLoop, ...]:
    """Return every loop that trains.

    Args:
        kinds: ``model``, ``loss``, ``optimizer`` or ``scheduler`` for each path of the namespace that leads to one.
        line: of the failing cell, the one that was running; ``running``: ``(cell, line)`` of all, functions included.
    """
    found = [(scope, loop) for scope in program.scopes for loop in _loops(program.seen_from(scope), scope)]
    told = [_facts(program.seen_from(scope), scope, loop, kinds) for scope, loop in found]
    ran = [_was_running(program, scope, loop, line, running) for scope, loop in found]
    return tuple(replace(facts, was_running=was) for facts, was in zip(told, ran, strict=True))


def _was_running(
    program: Program, scope: Scope, loop: Loop, line: int | None, running: Collection[tuple[int, int]]
) -> bool:
    """Whether the loop was under way: one of a function is known not to be where all lines that ran are known."""
    if scope not in program.running:
        return False
    if line is None or (scope.function is not None and not running):
        return True
    masked = program.masked.get(program.failing)
    if scope.function is None and masked is not None and any(text.startswith("%%") for _, text in masked.hidden):
        return True  # a cell magic runs the lines below it as code of its own
    lines = {(program.failing, line), *running}
    return any(cell == scope.cell and loop.lineno <= at <= (loop.end_lineno or at) for cell, at in lines)


def called_like_a_model(text: str) -> bool:
    """Whether custom has it that what is called ``text`` is a model."""
    return _MODEL.match(text) is not None


def _loops(program: Program, scope: Scope) -> Iterator[Loop]:
    """Yield the innermost loops of ``scope`` in which a step is taken, or backward is called if none is."""
    events = [(loop, _events_within(program, loop, 2)) for loop in _all_loops(scope)]
    stepping = [loop for loop, done in events if {"backward", "step"} <= done]
    trains = stepping or [loop for loop, done in events if "backward" in done]
    for loop in trains:
        if not any(other is not loop and other in ast.walk(loop) for other in trains):
            yield loop


def _all_loops(scope: Scope) -> list[Loop]:
    return [node for node in own_nodes(scope.body) if isinstance(node, Loop)]


def _events_within(program: Program, loop: Loop, depth: int) -> set[str]:
    return {event for event, _ in _events(program, loop.body, _NO_ROLES, depth)}


def _facts(program: Program, scope: Scope, loop: Loop, kinds: Mapping[str, str]) -> TrainingLoop:
    arguments = program.given(scope) | dict(_attributes(program, scope))
    roles = _Roles(kinds, arguments)
    events = list(_events(program, loop.body, roles, depth=2))
    loss, loss_call = _loss(loop)
    return TrainingLoop(
        cell=scope.cell,
        line=loop.lineno,
        file=scope.file,
        end_line=loop.end_lineno,
        function=scope.name or None,
        in_failing_run=scope in program.running,
        loader=ast.unparse(loop.test if isinstance(loop, ast.While) else _taken(scope, loop)[1]),
        batch=_batch(scope, loop),
        models=_unique(text for event, text in events if event == "forward"),
        optimizers=_unique(text for event, text in events if event == "step"),
        loss=loss,
        loss_call=loss_call,
        order=_unique(event for event, _ in events),
        accumulates=_accumulates(loop, roles),
        draws=_unique(
            ast.unparse(node)
            for node in _nodes_run(program, loop.body, _batch(scope, loop))
            if isinstance(node, ast.Call) and _DRAWS.match(call_name(node))
        ),
        stands_for=tuple(
            (name, path) for name, path in arguments.items() if path in kinds or kinds.get(path.partition(".")[0])
        ),
    )


def _attributes(program: Program, scope: Scope) -> Iterator[tuple[str, str]]:
    """Yield ``self.model`` and what stands for it where every object of the class is made: ``model``."""
    made = next((one for one in program.scopes if scope.owner and one.name == f"{scope.owner}.__init__"), None)
    given = {} if made is None else program.given(made)
    for node in () if made is None else own_nodes(made.body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("self."):
            value = node.value
            while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _MOVES:
                value = value.func.value
            if isinstance(value, ast.Name) and value.id in given:
                yield ast.unparse(node.targets[0]), given[value.id]


def _nodes_run(program: Program, body: list[ast.stmt], batch: tuple[str, ...]) -> Iterator[ast.AST]:
    """Yield the nodes of the loop and of the functions that it calls, but for what makes up the batch itself."""
    rest = [node for node in body if not (isinstance(node, ast.Assign) and set(batch) & set(target_names(node)))]
    waiting, seen = list(own_nodes(rest)), set[int]()
    while waiting:
        node = waiting.pop(0)
        yield node
        name = call_name(node) if isinstance(node, ast.Call) else ""
        called = program.function(name) if name and "." not in name else None
        if called is not None and id(called) not in seen:
            seen.add(id(called))
            waiting += own_nodes(called.body)


def _events(program: Program, body: list[ast.stmt], roles: _Roles, depth: int) -> Iterator[tuple[str, str]]:
    """Yield ``(event, what it is done to)`` in the order in which the calls run, going into functions called."""
    for call in _calls(body):
        text, method = ast.unparse(call.func), torch_functions.last_name(call)
        event = _event(call, roles)
        own = program.function(method if event and event[0] == "step" else text) if program.is_own(text) else None
        if event is not None and event[0] in {"forward", "step"} and roles.of(text) is None and own is not None:
            event = None  # a function of the cells, whatever its name sounds like
        if event is not None:
            if event[0] == "step" and call.args and imports_library(program, "jittor"):
                yield "backward", ast.unparse(call.args[0])  # Jittor's optimizers take the gradient themselves
            yield event
            if method == "step" and call.args and (closure := program.function(call_name(call.args[0]))) is not None:
                yield from _events(program, list(closure.body), roles, 0)
        elif depth and (called := program.function(method)) is not None and program.is_own(text):
            if any("backward" in _events_within(program, loop, depth - 1) for loop in _all_loops(called)):
                continue  # an epoch around a function that trains: the loop to change is the function's
            arguments = program.given(called)
            inner = _Roles(roles.kinds, {k: roles.stands_for.get(v, v) for k, v in arguments.items()})
            for kind, of in _events(program, list(called.body), inner, depth - 1):
                yield kind, arguments.get(of, of)


def _event(call: ast.Call, roles: _Roles) -> tuple[str, str] | None:
    text = ast.unparse(call.func)
    receiver, _, method = text.rpartition(".")
    if method in {"zero_grad", "backward"}:
        return method, receiver
    if method in _CLIPS:
        return "clip", receiver
    if method == "step" and receiver:
        of = ast.unparse(call.args[0]) if call.args and "scaler" in receiver.lower() else receiver
        kind = roles.of(of) or ("scheduler" if _SCHEDULER.search(of) else "optimizer")
        return ("schedule" if kind == "scheduler" else "step"), of
    if roles.of(text) == "model" or (roles.of(text) is None and called_like_a_model(text)):
        return "forward", text
    return None


def is_given_loss(receiver: str) -> bool:
    """Return whether ``backward`` of what is called so is given the loss: of accelerate, Fabric, apex and Jittor."""
    return _GIVEN_LOSS.search(receiver) is not None


def _calls(body: Iterable[ast.AST]) -> Iterator[ast.Call]:
    """Yield calls, arguments before what they are passed to."""
    for node in body:
        if not isinstance(node, Definition | ast.Lambda):
            yield from _calls(ast.iter_child_nodes(node))
            if isinstance(node, ast.Call):
                yield node


def _iterated(scope: Scope, loop: ast.For | ast.AsyncFor) -> ast.expr:
    """Return what a loop goes through: the bar that the scope has put around it before, where it goes by its name."""
    if not isinstance(loop.iter, ast.Name):
        return loop.iter
    bars = [
        node.value
        for node in own_nodes(scope.body)
        if isinstance(node, ast.Assign) and node.lineno < loop.lineno and loop.iter.id in target_names(node.targets[0])
    ]
    wraps = bool(bars) and isinstance(bars[-1], ast.Call) and call_name(bars[-1]).rpartition(".")[2] in _WRAPPERS
    return bars[-1] if wraps else loop.iter


def _taken(scope: Scope, loop: ast.For | ast.AsyncFor) -> tuple[ast.expr, ast.expr]:
    """Return the target of a loop and what it takes its items of, without ``enumerate``, ``tqdm`` and the like."""
    target, node = loop.target, _iterated(scope, loop)
    while isinstance(node, ast.Call) and torch_functions.last_name(node) in _WRAPPERS and node.args:
        if call_name(node) == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
            target = target.elts[1]
        node = node.args[0]
    return target, node


def _batch(scope: Scope, loop: Loop) -> tuple[str, ...]:
    """Return the names that hold the batch: those of the loop target, or those bound by indexing in the body."""
    if isinstance(loop, ast.While):
        return _drawn(loop.body)
    target, node = _taken(scope, loop)
    counts = isinstance(node, ast.Call) and torch_functions.last_name(node) in {"range", "trange", "count"}
    return _drawn(loop.body) if counts else target_names(target)


def batch_of(region: Region) -> tuple[str, ...]:
    """Return the names that may hold the batch where a region begins: of its loop, or of its function."""
    loop = region.loop
    if loop is not None:
        return _batch(region.scope, loop)
    function = region.function
    if function is None:
        return ()
    given = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return (*(one.arg for one in given if one.arg != "self"), *_drawn([*region.body]))


def _drawn(body: list[ast.stmt]) -> tuple[str, ...]:
    inside = [part for node in body if isinstance(node, ast.Try) for part in node.body]
    made = [node for node in [*body, *inside] if isinstance(node, ast.Assign)]
    cut = [node for node in made if any(map(_draws_batch, _parts(node.value)))]
    cut = cut or [node for node in made if any(map(_makes_up_batch, _parts(node.value)))]
    names = {name for node in cut for name in target_names(*node.targets)}
    cut = [node for node in cut if not names & loaded(node.value)]  # what is cut by the batch is made of it
    return _unique(name for node in cut for name in target_names(*node.targets))


def _parts(value: ast.AST) -> list[ast.AST]:
    return list(value.elts) if isinstance(value, ast.Tuple) else [value]


def _draws_batch(value: ast.AST) -> bool:
    if isinstance(value, ast.Subscript):
        return not isinstance(value.slice, ast.Constant) and isinstance(value.value, ast.Name | ast.Attribute)
    name = call_name(value).rpartition(".")[2] if isinstance(value, ast.Call) else ""
    return name == "next" or "batch" in name.lower()


def _makes_up_batch(value: ast.AST) -> bool:
    """Whether it is random numbers of several dimensions, which stand for data where a loop has no other."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in {"to", "cuda"}:
        value = value.func.value
    name = call_name(value) if isinstance(value, ast.Call) else ""
    return name in {"torch.rand", "torch.randn", "torch.randint"}


def _loss(loop: Loop) -> tuple[str | None, str | None]:
    """Return the name that ``backward`` is called on, and the call that made it."""
    for call in _calls(loop.body):
        receiver, _, method = ast.unparse(call.func).rpartition(".")
        if method != "backward":
            continue
        value: ast.AST = call.func.value if isinstance(call.func, ast.Attribute) else call
        if call.args and not isinstance(value, ast.Call) and is_given_loss(receiver):
            value = call.args[0]
        elif isinstance(value, ast.Call) and "scaler" in ast.unparse(value.func).lower() and value.args:
            value = value.args[0]
        if not isinstance(value, ast.Name):
            first = next((node for node in ast.walk(value) if isinstance(node, ast.Call)), None)
            return None, ast.unparse(first) if first is not None else None
        nodes = (node for node in own_nodes(loop.body) if isinstance(node, ast.Assign))
        made = [node.value for node in nodes if value.id in target_names(*node.targets)]
        calls = [ast.unparse(one) for one in made if isinstance(one, ast.Call)]
        return value.id, calls[-1] if calls else None
    return None, None


def _accumulates(loop: Loop, roles: _Roles) -> bool:
    """Whether a step is under a condition on the count of batches, or backward is in a loop within the step."""
    for node in own_nodes(loop.body):
        if isinstance(node, ast.If) and any(isinstance(n, ast.Mod) for n in ast.walk(node.test)):
            steps = (_event(call, roles) for call in _calls(node.body + node.orelse))
            if any(event is not None and event[0] in {"step", "zero_grad"} for event in steps):
                return True
        if isinstance(node, ast.With) and any("accumulate" in ast.unparse(item.context_expr) for item in node.items):
            return True
        if isinstance(node, ast.For) and any(
            torch_functions.last_name(call) == "backward" for call in _calls(node.body)
        ):
            return True
    return False


def _unique(items: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))
