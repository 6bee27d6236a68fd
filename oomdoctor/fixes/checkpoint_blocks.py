"""Repeated blocks recomputed in the backward pass instead of kept: the classic trade of time for memory.

Live, each block's ``forward`` runs under non-reentrant ``torch.utils.checkpoint``, which keeps the block's inputs and
the state of torch's random number generators, so that dropout draws the same masks again. Running statistics of
BatchNorm count each batch once. A block whose forward changes anything else of its own is refused when the first
recomputation shows it.

In the source, the same is a loop over the blocks that stands where the model is made: it puts a ``partial`` of the
block's own bound ``forward`` on each. That was chosen over an edit of the class's ``forward``, which the instance that
is there would not see, and over wrapper modules, which rename the keys of ``state_dict``. The loop leaves out blocks
that have their ``partial``, so running it again changes nothing; ``deepcopy`` binds the copy's own ``forward``. Limits:
blocks with BatchNorm are refused there, as plain ``checkpoint`` would count their batches twice. Where the model has a
switch, the source turns that on: such models keep the keys of earlier tokens for each layer, which their blocks, run
again from outside, would find there.

Cells that recompute activations already are told by their calls, wherever these stand; modules are not looked at.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _trainer_source, _trainer_terms
from oomdoctor.fixes._activations import found_or_asked, why_not_short
from oomdoctor.fixes._chunks import model_facts
from oomdoctor.model.absence import Refused
from oomdoctor.model.code import CodeFacts, ModelFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Fix, Patch, Proposal
from oomdoctor.model.session import Cells
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.kinds import child_path
from oomdoctor.program import import_lines, rewriting
from oomdoctor.program.bindings import last_binding
from oomdoctor.program.magics import parsed
from oomdoctor.program.names import bound_names, call_name, imported

if TYPE_CHECKING:
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.session import Cell, Cells, Session

__all__ = ["FIX", "apply", "patch", "propose"]

_EVERY: Final = (2, 1)
"""Every other block, then all."""

_KEPT_RATIO: Final = 2 / 34
"""What a recomputed transformer block keeps of its activations. Source: Korthikanti et al., arXiv:2205.05198, table 2:
2sbh bytes of inputs out of 34sbh and more."""

_FORWARD_SHARE: Final = 1 / 3
"""A forward's share of a step: the backward pass costs about two forwards. Source: as above, section 4.3."""

_SWITCHES: Final = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""The model's own switch: the name of transformers since 5.23, where the older one warns and is gone in 6."""

_HOME: Final = "torch.utils.checkpoint"
_METHODS: Final = frozenset({*_SWITCHES, "set_grad_checkpointing"})


def propose(incident: Incident, evidence: Evidence) -> tuple[Proposal, ...] | Refused:
    """Propose every other block, then all, where a model has repeated blocks and gradients are on."""
    if (through := _trainer_terms.proposed("checkpoint_blocks", incident, evidence)) is not None:
        return through
    code = evidence.code
    if code.grad_disabled:
        return Refused("gradients are off: nothing is kept for a backward pass")
    with_blocks = [model for model in code.models if model.blocks]
    if not with_blocks:
        return Refused("no model with repeated blocks was found")
    if all(model.switches and not model.training for model in with_blocks):
        return Refused(f"`{with_blocks[0].path}` _recomputes its layers in training alone, and is in evaluation mode")
    if (why := why_not_short(incident, evidence)) is not None:
        return Refused(why)
    activations = found_or_asked(incident, evidence)
    if not activations:
        return Refused("no activations were found that recomputing could save")
    # A switch turns the cache of keys and values off as well, whose tensors may be rounded otherwise.
    switched = any(model.switches for model in with_blocks) or _trainer_source.owner(code, "checkpoint_blocks")
    return tuple(
        Proposal(
            dose=Dose.of(every=every),
            effect=Effect.EQUIVALENT if switched else Effect.EXACT,
            saves=int(activations * (1 - _KEPT_RATIO) / every),
            slowdown=1 + _FORWARD_SHARE / every,
            basis=f"estimate: {'every block' if every == 1 else 'every other block'} keeps its inputs only, "
            f"of {format_size(activations)} of activations",
        )
        for every in _EVERY
    )


@contextmanager
def apply(session: Session, dose: Dose) -> Iterator[None]:
    """Recompute every ``every``-th repeated block of the session's models; undone on exit.

    Raises:
        OomDoctorError: no model has blocks that can be recomputed, or one of them cannot be without a trace.
    """
    from oomdoctor.fixes import _forward

    if _recomputes(session.cells):
        raise OomDoctorError("the code recomputes activations already")
    chosen: dict[int, tuple[str, Any]] = {}
    every = dose.number("every")
    with ExitStack() as stack:
        for path, model in session.modules:
            blocks = list(_blocks(path, model))
            if blocks:
                _forward.refuse_unless_plain(path, model)
            for name, block in blocks[::every]:
                _forward.refuse_hooks(name, block, own=False)
                chosen.setdefault(id(block), (name, block))
        if not chosen:
            raise OomDoctorError("no repeated blocks were found that are not recomputed already")
        names = {key: name for key, (name, _) in chosen.items()}
        stack.enter_context(_forward.replaced([block for _, block in chosen.values()], _recompute(names)))
        yield


def _recompute(names: dict[int, str]) -> Any:
    import torch

    from oomdoctor.fixes import _forward

    def run(block: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return _forward.recomputed(names.get(id(block), type(block).__name__), block, forward, args, kwargs)

    return run


def _blocks(path: str, module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the repeated blocks of ``module``: two children or more of one class in the outermost containers."""
    import torch

    if _has_switch(module):
        return
    children = [(child_path(path, name), child) for name, child in module.named_children()]
    is_container = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    if is_container and len(children) > 1 and len({type(child) for _, child in children}) == 1:
        if _is_layer(children[0][1]):
            return
        # A partial is what the patch of this fix has put there.
        yield from (item for item in children if not isinstance(vars(item[1]).get("forward"), partial))
        return
    for name, child in children:
        yield from _blocks(name, child)


def _is_layer(module: Any) -> bool:
    """Whether it is a single layer of torch: what it keeps is its input, which recomputing it needs as well."""
    import torch

    is_single = type(module).__module__.startswith("torch.nn.modules.") and not any(module.children())
    return is_single and not isinstance(module, torch.nn.RNNBase)


def _has_switch(model: Any) -> bool:
    """Whether the model recomputes its own layers when it is told to, as those of transformers do."""
    names = (inspect.getattr_static(type(model), name, None) for name in _SWITCHES)
    return inspect.getattr_static(type(model), "supports_gradient_checkpointing", None) is True and any(names)


def patch(cells: Cells, evidence: Evidence, dose: Dose) -> Patch | Refused:
    """Put a loop over the blocks behind the line that makes the model."""
    if _recomputes(cells):
        return Refused("the code recomputes activations already")
    through = _trainer_source.patched("checkpoint_blocks", cells, evidence, dose) if dose["every"] == 1 else None
    if through is not None:
        return through
    models = [model for model in evidence.code.models if model.blocks]
    if not models:
        return Refused("no model with repeated blocks was found")
    copied = len(models) > 1
    if copied:
        # A copy of the model, for an average of its weights, is no reason not to recompute the one that is trained.
        trained = _trained(evidence.code)
        models = [model for model in models if model.path in trained]
    if len(models) != 1:
        return Refused("several models have repeated blocks: which of them to recompute is for the user to say")
    return (_turned_on if models[0].switches else _looped)(cells, models[0], dose.number("every"), copied=copied)


def _trained(code: CodeFacts) -> set[str]:
    """Return the paths of the models that the training loops of the failing run call."""
    facts = (model_facts(code, loop, text) for loop in code.loops if loop.in_failing_run for text in loop.models)
    return {model.path for model in facts if model is not None}


def _turned_on(cells: Cells, model: ModelFacts, every: int, *, copied: bool) -> Patch | Refused:
    lines = []
    for path, may_leave_out in model.switches:
        owner, _, method = path.rpartition(".")
        if (why := _counts_twice(model, [owner])) is not None:
            return why
        argument = method.replace("enable", "kwargs") + '={"use_reentrant": False}'
        some = f", every_n_layers={every}" if may_leave_out and every > 1 else ""
        lines.append(f"{reduce(child_path, path.split('.'), model.path)}({argument}{some})\n")
    return _placed(cells, re.split(r"[.\[]", model.path, maxsplit=1)[0], "".join(lines), (), copied=copied)


def _looped(cells: Cells, model: ModelFacts, every: int, *, copied: bool) -> Patch | Refused:
    containers = _outermost(model.blocks)
    if (why := _counts_twice(model, containers)) is not None:
        return why
    checkpoint = import_lines.name_for("torch.utils.checkpoint", "checkpoint", cells, "recompute")
    partial_name = import_lines.name_for("functools", "partial", cells, "bind")
    block = rewriting.fresh_name("block", cells)
    paths = [reduce(child_path, filter(None, container.split(".")), model.path) for container in containers]
    blocks = paths[0] if len(paths) == 1 else f"[{', '.join(f'*{path}' for path in paths)}]"
    loop = (
        f"for {block} in {blocks}{'' if every == 1 else f'[::{every}]'}:\n"
        f"    if not isinstance({block}.forward, {partial_name}):  # once is enough when this cell is run again\n"
        f"        {block}.forward = {partial_name}({checkpoint}, {block}.forward, use_reentrant=False)\n"
    )
    imports = (
        import_lines.source_of("functools", "partial", partial_name),
        import_lines.source_of("torch.utils.checkpoint", "checkpoint", checkpoint),
    )
    return _placed(cells, re.split(r"[.\[]", model.path, maxsplit=1)[0], loop, imports, copied=copied)


def _counts_twice(model: ModelFacts, containers: Sequence[str]) -> Refused | None:
    for path in model.batch_norm if model.training else ():
        if any(_stands_in(path, container) for container in containers):
            return Refused(f"plain checkpoint would count each batch twice in the running statistics of {path}")
    return None


def _outermost(containers: tuple[str, ...]) -> list[str]:
    """Return the containers that stand in no other one."""
    kept: list[str] = []
    for path in containers:
        if not any(_stands_in(path, outer) for outer in kept):
            kept.append(path)
    return kept


def _stands_in(path: str, container: str) -> bool:
    return not container or path.startswith(f"{container}.")


def _placed(cells: Cells, root: str, loop: str, imports: tuple[str, ...], *, copied: bool) -> Patch | Refused:
    """Return the patch that runs ``loop`` right after ``root`` is bound, or first in the failing cell.

    Where it may have been ``copied`` since, an earlier cell is left alone: its copies would recompute as well.
    """
    for cell in [cells.failing] if copied else reversed(cells.beside(cells.failing).history):
        parsed = rewriting.read(cell.source)
        if isinstance(parsed, Refused):
            if cell is cells.failing:
                return parsed
            continue
        before = any(root in bound_names(one.source) for one in cells.history if one.number < cell.number)
        bound = last_binding(parsed, root, bound_before=before)
        made = bound.whole if bound is not None else None
        if made is None and cell is not cells.failing:
            continue
        if made is not None:
            return _written(cells, cell, parsed, made, loop, imports)
    parsed = rewriting.read(cells.failing.source)
    return parsed if isinstance(parsed, Refused) else _written(cells, cells.failing, parsed, None, loop, imports)


def _written(
    cells: Cells,
    cell: Cell,
    parsed: rewriting.ParsedCell,
    made: rewriting.Statement | None,
    loop: str,
    imports: tuple[str, ...],
) -> Patch | Refused:
    if made is None:
        module = import_lines.insert_at_top(parsed, parsed.module, [*imports, loop])
    else:
        changed = rewriting.replace(parsed.module, made, [made, *rewriting.statements(loop, parsed)])
        module = import_lines.insert_at_top(parsed, changed, imports)
    return rewriting.join(cells, [rewriting.edit(cells, cell, parsed, module, live=[loop])])


def _recomputes(cells: Cells) -> bool:
    """Return whether a cell uses what ``torch.utils.checkpoint`` has, or calls a model's switch for it."""
    trees = [tree for cell in cells.history if (tree := parsed(cell.source)) is not None]
    # Names are of one namespace: one cell imports what another one calls.
    aliases = dict(alias for tree in trees for node in ast.walk(tree) for alias in imported(node))
    return any(_uses(node, aliases) for tree in trees for node in ast.walk(tree))


def _uses(node: ast.AST, aliases: dict[str, str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        return not _turns_off(node.args)
    if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
        return False
    root, dot, rest = call_name(node).partition(".")
    return f"{aliases.get(root, root)}{dot}{rest}".startswith(f"{_HOME}.")


def _turns_off(args: Sequence[ast.expr]) -> bool:
    return bool(args) and isinstance(args[0], ast.Constant) and args[0].value is False


FIX: Final = Fix(
    id="checkpoint_blocks",
    title="Recompute repeated blocks in the backward pass instead of keeping their activations",
    effect=Effect.EXACT,
    cost="one more forward of each recomputed block",
    propose=propose,
    apply=apply,
    patch=patch,
    leaves=("._forward_hooks", ".gradient_checkpointing", "._gradient_checkpointing_func"),
    tolerance=1e-4,
)
