"""Who holds the memory: every storage gets one owner, a role, and a path that the user can type.

Owners are asked in a fixed order, so that a storage held twice goes to the holder that matters most: modules and
their gradients, optimizers, names of the namespace and what hangs on them, ``Out``, frames that failed or run, earlier
tracebacks, the autograd graphs of all of these, and last whatever else the garbage collector knows.

No operation is dispatched, nothing is allocated on a device, and no code of the user's is run. What only C++ holds
(buffers of a backward that is under way) has no Python owner: it is the difference to the allocator's own count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import itemgetter
from typing import Any, Final

import torch

from oomdoctor.evidence.owners import C_COUNTS, Ledger, Place, all_tensors, bases_of, held_by_c
from oomdoctor.evidence.saved_in import Modules, note_modules
from oomdoctor.model.memory import Census, Role
from oomdoctor.objects.children import bounds_of, sort_of
from oomdoctor.objects.containers import items_of, pairs_of
from oomdoctor.objects.frames import Frame, in_backward_elsewhere
from oomdoctor.objects.kinds import Kind, is_plain_key, kind_of, parts_of, plain_dict, registered
from oomdoctor.objects.paths import Found, Holder, Origin, Path, Root, Ways, member
from oomdoctor.objects.storages import (
    DEEPEST,
    Bare,
    Graphs,
    Saved,
    begin_of,
    is_fake,
    is_plain,
    storages_of,
    unobserved,
)
from oomdoctor.objects.walk import CACHE_NAMES, Walk, tensors_in

_GRAPH: Final = " → graph"
_NAMELESS: Final = Path(Root(""), None, "(no name leads here)")
_CHECKPOINT: Final = "torch.utils.checkpoint."

_OWNERS: Final = frozenset({Kind.MODULE, Kind.OPTIMIZER})

_grad: Final = vars(torch._C.TensorBase)["grad"].__get__
_grad_fn: Final = vars(torch._C.TensorBase)["grad_fn"].__get__
_is_leaf: Final = vars(torch._C.TensorBase)["is_leaf"].__get__
_requires_grad: Final = vars(torch._C.TensorBase)["requires_grad"].__get__
_retains_grad: Final = vars(torch._C.TensorBase)["retains_grad"].__get__


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What the census sets out from.

    Attributes:
        names: of the namespace, with their objects; ``outputs``: of the output cache.
        borrowed: names that stand for a part of something else, if that has a name; loops bind them.
        passed_over: objects by their ``id`` that are not looked into: the namespace itself, the output cache.
        frames: that failed or that run; ``earlier``: of a failure before, which its traceback still holds.
        batch_names: names that hold a batch.
        in_step: whether code of the program's is running or has failed, so that what has no name is its temporaries.
        step_names: names that the running or failing cell binds: what they hold belongs to the step under way, a
            container apart.
        step_results: names that the loops of the failing cell bind anew in each round, containers too.
        appends: the statement that adds a tensor with its graph to a list, by the name of the list.
    """

    names: Sequence[tuple[str, Any]]
    borrowed: frozenset[str] = frozenset()
    passed_over: frozenset[int] = frozenset()
    outputs: Sequence[tuple[str, Any]] = ()
    frames: Sequence[Frame] = ()
    earlier: Sequence[Frame] = ()
    batch_names: frozenset[str] = frozenset()
    in_step: bool = False
    step_names: frozenset[str] = frozenset()
    step_results: frozenset[str] = frozenset()
    appends: Mapping[str, str] = field(default_factory=dict)


def take(program: Program, places: Sequence[Place]) -> tuple[Census, ...]:
    """Take the census of ``places``, one for each, in their order."""
    with unobserved():
        return _Count(program, places).run()


def _graph_of(tensor: Any) -> Any:
    """Return the node of the graph that made a tensor, None for one that torch has emptied; up to 2.4 that raises."""
    try:
        return _grad_fn(tensor)
    except RuntimeError:
        return None


@dataclass(slots=True)
class _Held:
    """Tensors met on the walk, those that require grad, and what the graph behind each holds, in their order."""

    found: Found
    requiring: list[Any] = field(init=False)
    saved: list[Saved | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.requiring = list(compress(self.found.tensors, map(_requires_grad, self.found.tensors)))

    @property
    def origin(self) -> Origin:
        """What binds the root of the path to them."""
        return self.found.path.root.origin


class _Count:
    """One census while it is taken. Short-lived: it holds tensors and graph nodes."""

    def __init__(self, program: Program, places: Sequence[Place]) -> None:
        self._program = program
        self._ledger = Ledger(places)
        classes = ((name, value) for name, value in reversed(program.names) if issubclass(type(value), type))
        self._walk = Walk(program.passed_over, {id(value): name for name, value in classes})
        self._graphs = Graphs()
        self._parameters: dict[int, Path] = {}
        self._modules = Modules()
        self._inner = frozenset(_within_modules(program.frames))
        self._stepped_by: dict[int, Path] = {}
        self._graphs_at: list[Holder] = []
        self._inputs: set[int] = set()
        self._known: list[Found] = []
        self._claims: list[tuple[Sequence[Any], Path, str]] = []
        self._with_graph: list[tuple[Any, Path]] = []
        """Gradients that have a graph of their own."""
        self._fakes = 0
        self._skips_graphs = in_backward_elsewhere()
        self._may_pin = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def run(self) -> tuple[Census, ...]:
        found = [met for roots in self._roots() for met in self._walk.run(roots)]
        self._claim_all(found)
        self._claim_hidden()
        nameless = self._nameless(all_tensors())
        while self._walk.has_more:
            self._claim_all(self._walk.resume())
            self._claim_hidden()
            nameless = self._nameless(nameless)
        self._claim_rest(nameless)
        self._share_arrays()
        self._modules.note_frames(frame.values.get("self") for frame in self._program.frames if not frame.ends)
        note_modules(self._graphs, self._ledger, self._modules)
        return self._ledger.censuses(tuple(self._notes()), self._ways())

    def _claim_hidden(self) -> None:
        """Claim what hangs on tensors that were met, and on tracebacks that the program keeps."""
        while self._known or self._walk.has_unwound or self._with_graph:
            for gradient, path in self._with_graph:
                self._claim_graph_of(gradient, path)
            self._with_graph.clear()
            known, self._known = self._known, []
            self._claim_all([*self._walk.unwind(), *self._walk.beside(known)])

    def _claim_all(self, found: list[Found]) -> None:
        every = [_Held(met) for met in found]
        self._claim_modules()
        self._claim_optimizers()
        self._known += found
        for held in sorted(every, key=self._is_of_step):  # what is kept owns the nodes that it shares with this step
            self._follow(held)
        for held in every:
            self._claim_held(held)
        for held in every:
            self._claim_saved(held)
        for held in every:
            if held.found.storage is not None:
                bare = Bare(held.found.storage)
                self._claim((bare,), self._role_of(held, bare, None), held.found.path, frees=self._frees(held))
        for held in every:
            for saved in filter(None, held.saved):
                suffix = _GRAPH if held.found.node is None else ""
                self._claim(saved.again, Role.USER_TENSOR, held.found.path, suffix=suffix)

    def _ways(self) -> Ways | None:
        """Return who leads to what beside the paths of the owners; None where not all of that was looked at."""
        if self._walk.stopped or self._skips_graphs or self._graphs.is_cut:
            return None
        for before, numbers in self._graphs.links.items():
            first = self._graphs_at[before]
            into = {holder.key: holder for holder in (self._graphs_at[number] for number in numbers)}
            for again in into.values():
                if again.key != first.key:
                    self._walk.ways.add(first, again)
        return self._walk.ways

    def _roots(self) -> Iterator[list[tuple[Root, Any]]]:
        program = self._program
        # Most names of a long notebook hold a number or a text, which lead nowhere.
        leading = [(name, value) for name, value in program.names if sort_of(type(value)).kind is not Kind.ATOM]
        names = [(Root(name, ident=id(value)), value) for name, value in leading]
        own = [(root, value) for root, value in names if root.name not in program.borrowed]
        # First what the walk must not miss should it be stopped among data.
        owners = [(root, value) for root, value in own if kind_of(type(value)) in _OWNERS]
        # A name for a part tells less than the path from the model.
        inner = parts_of([value for _, value in owners if kind_of(type(value)) is Kind.MODULE])
        yield [(root, value) for root, value in owners if id(value) not in inner]
        yield [(root, value) for root, value in owners if id(value) in inner]
        yield [(root, value) for root, value in own if kind_of(type(value)) not in _OWNERS]
        yield [(root, value) for root, value in names if root.name in program.borrowed]
        yield [(Root(name, ident=id(value), origin=Origin.OUTPUT), value) for name, value in program.outputs]
        for origin, frames in ((Origin.FRAME, program.frames), (Origin.EARLIER, program.earlier)):
            for frame in sorted(frames, key=lambda frame: not frame.is_program):  # a name of the user's tells more
                drives = frame.is_program and kind_of(type(frame.values.get("self"))) is not Kind.MODULE
                yield [
                    (Root(name, frame.place, drives, origin=origin, ends=frame.ends), value)
                    for name, value in frame.values.items()
                ]

    def _claim_modules(self) -> None:
        self._note_steps()
        while self._walk.modules:
            path, module = self._walk.modules.popleft()
            own = plain_dict(module)
            if not path.root.place:
                self._modules.add(path, module)
            for at, (name, parameter) in enumerate(registered(module, "_parameters", own)):
                if kind_of(type(parameter)) is Kind.TENSOR:
                    here = path.child(member(module, name, "_parameters", at))
                    self._claim((parameter,), Role.PARAMETER, here)
                    self._claim_gradient(parameter, here, self._stepped_by.get(id(parameter), path))
                    self._known.append(Found((parameter,), here))
                    if not here.root.place:
                        self._parameters[id(parameter)] = here
                        self._modules.note_parameters(path, at + 1)
            for at, (name, buffer) in enumerate(registered(module, "_buffers", own)):
                if kind_of(type(buffer)) is Kind.TENSOR:
                    role = Role.KV_CACHE if name in CACHE_NAMES else Role.BUFFER
                    self._claim((buffer,), role, path.child(member(module, name, "_buffers", at)))

    def _note_steps(self) -> None:
        """Note the path of the optimizer of every parameter, by the parameter's ``id``."""
        for path, optimizer in self._walk.optimizers:
            if not path.root.place:
                for _, _, parameter in _stepped(optimizer):
                    self._stepped_by[id(parameter)] = path

    def _claim_optimizers(self) -> None:
        while self._walk.optimizers:
            path, optimizer = self._walk.optimizers.popleft()
            for at, index, parameter in _stepped(optimizer):
                here = path.child(f".param_groups[{at}]['params'][{index}]")
                self._claim((parameter,), Role.PARAMETER, here)
                self._claim_gradient(parameter, here, path)
            for parameter, state in _pairs((plain_dict(optimizer) or {}).get("state")):
                of = self._parameters.get(id(parameter))
                key = of.exact() if of else None
                here = path.child(f".state[{key}]" if key else f" → state of a parameter of {path.root.name}")
                for name, value in _pairs(state):
                    tensors = tuple(tensors_in(value))
                    step = f"[{name!r}]" if is_plain_key(name) else " → state"
                    self._claim(tensors, Role.OPTIMIZER_STATE, here.child(step))

    def _claim_gradient(self, tensor: Any, path: Path, zeroed_by: Path | None) -> None:
        """Claim the gradient of a tensor, which the module or optimizer at ``zeroed_by`` zeroes, else the tensor's."""
        if (_is_leaf(tensor) and _requires_grad(tensor)) or _retains_grad(tensor):
            gradient = _grad(tensor)
            if gradient is not None:
                owner = zeroed_by.exact() if zeroed_by else None
                own = path.exact() if zeroed_by is None else None
                frees = f"{owner}.zero_grad(set_to_none=True)" if owner else f"{own}.grad = None" if own else None
                here = path.child(".grad")
                self._claim((gradient,), Role.GRADIENT, here, frees=frees)
                if _grad_fn(gradient) is not None:
                    self._with_graph.append((gradient, here))

    def _claim_graph_of(self, gradient: Any, path: Path) -> None:
        """Claim the graph of a gradient, as ``backward(create_graph=True)`` makes it.

        It leads to the tensor, and the tensor to the gradient: no name lets go of this cycle, as C++ alone knows it.
        """
        saved = self._saved_behind(gradient, path)
        if saved is not None:
            self._walk.ways.add(Holder(path, is_graph=True), Holder(_NAMELESS))
            parameters = [tensor for tensor in (*saved.tensors, *saved.leaves) if type(tensor) is torch.nn.Parameter]
            self._claim(parameters, Role.PARAMETER, path, suffix=_GRAPH)
            self._claim(saved.tensors, _role_of_graph(path), path, suffix=_GRAPH)
            self._claim((*saved.leaves, *saved.again), Role.USER_TENSOR, path, suffix=_GRAPH)

    def _saved_behind(self, tensor: Any, path: Path) -> Saved | None:
        """Return what is behind a tensor whose graph is held at ``path``, None where there is none or it may change."""
        saved = None if self._skips_graphs else self._graphs.behind(tensor)
        if saved is not None:
            self._graphs_at.append(Holder(path, is_graph=True))
        return saved

    def _claim(self, tensors: Sequence[Any], role: Role, path: Path, **more: Any) -> None:
        self._claims.append((tensors, path, more.get("suffix", "")))
        if self._may_pin and role in (Role.ACTIVATION, Role.USER_TENSOR):
            plain = (tensor for tensor in tensors if type(tensor) is torch.Tensor)
            pinned = [tensor for tensor in plain if tensor.is_cpu and tensor.is_pinned()]
            self._ledger.claim(pinned, Role.PINNED_HOST, path, **more)
        self._ledger.claim(tensors, role, path, **more)

    def _is_of_step(self, held: _Held) -> bool:
        """Return whether tensors belong to the step under way, and are not what is left or kept of others."""
        root = held.found.path.root
        if root.name in self._program.appends:
            return False
        if held.origin is Origin.FRAME:
            return True
        names = self._program.step_results if held.found.contained else self._program.step_names
        return held.origin is Origin.NAME and root.name in names

    def _follow(self, held: _Held) -> None:
        if self._skips_graphs:
            return
        is_inner = held.found.path.root.place in self._inner
        if held.found.node is not None:
            held.saved = [self._graphs.from_node(held.found.node, is_inner=is_inner)]
        elif any(map(_grad_fn, held.requiring)):
            held.saved = [self._graphs.behind(tensor, is_inner=is_inner) for tensor in held.found.tensors]
        here = Holder(held.found.path, is_graph=held.found.node is None)
        self._graphs_at += [here for saved in held.saved if saved is not None]
        if self._is_of_step(held):
            for saved in filter(None, held.saved):
                plain = (tensor for tensor in saved.tensors if type(tensor) is torch.Tensor)
                given = [tensor for tensor in plain if not _requires_grad(tensor)]
                self._inputs.update(key for key, *_ in storages_of(given))

    def _claim_held(self, held: _Held) -> None:
        found, frees = held.found, self._frees(held)
        tensors = found.tensors
        if not held.saved and len(tensors) > 1 and len(set(map(id, map(type, tensors)))) == 1:
            items = None if found.first is None else (found.first, found.first + len(tensors))
            role = self._role_of(held, tensors[0], None)
            self._claim(tensors, role, found.path, items=items, sliceable=found.sliceable, frees=frees)
        else:
            for index, tensor in enumerate(tensors):
                role = self._role_of(held, tensor, held.saved[index] if held.saved else None)
                items = found.item(index)
                self._claim((tensor,), role, found.path, items=items, sliceable=found.sliceable, frees=frees)
                self._fakes += is_fake(tensor)
        for index, tensor in enumerate(tensors) if held.requiring else ():
            self._claim_gradient(tensor, found.path_of(index), None)

    def _role_of(self, held: _Held, tensor: Any, saved: Saved | None) -> Role:
        found, root = held.found, held.found.path.root
        if held.origin is Origin.OUTPUT:
            return Role.OUTPUT_CACHE
        if held.origin is Origin.EARLIER:
            return Role.TRACEBACK
        if found.role is not None:
            return found.role
        if root.is_program and root.name in self._program.batch_names:
            return Role.BATCH
        if type(tensor) is torch.nn.Parameter:
            return Role.PARAMETER
        if saved is None:
            # The graph of the step saved a tensor that it did not make.
            keys = [key for key, *_ in storages_of((tensor,))] if root.is_program and not found.contained else []
            if keys and self._inputs.issuperset(keys):
                return Role.BATCH
            return Role.USER_TENSOR if held.origin is Origin.NAME else Role.ACTIVATION
        return Role.GRAPH_KEPT_ALIVE if self._is_kept(held, saved) else Role.ACTIVATION

    def _is_kept(self, held: _Held, saved: Saved) -> bool:
        """Return whether a graph outlives its step: one in a container, or by a name that no running code binds."""
        return not self._is_of_step(held) and (held.found.contained or saved.is_alive)

    def _frees(self, held: _Held) -> str | None:
        """Return the statement by which not all that leads there must go.

        It adds to a list without the graph, in place of the one that does so with it, or unsets a gradient.
        """
        if held.found.role is Role.GRADIENT and held.found.node is None:
            exact = held.found.path.exact()
            return f"{exact} = None" if exact else None
        root = held.found.path.root.name
        if root not in self._program.appends:
            return None
        is_scalar = all(type(tensor) is torch.Tensor and not tensor.dim() for tensor in held.found.tensors)
        return self._program.appends[root].replace(".detach()", ".item()" if is_scalar else ".detach()")

    def _claim_saved(self, held: _Held) -> None:
        found, frees = held.found, self._frees(held)
        for index, saved in enumerate(held.saved):
            if saved is None or not (saved.tensors or saved.leaves):
                continue
            role = {Origin.OUTPUT: Role.OUTPUT_CACHE, Origin.EARLIER: Role.TRACEBACK}.get(held.origin)
            role = Role.TRACEBACK if found.role is Role.TRACEBACK else role
            if role is None:
                role = Role.GRAPH_KEPT_ALIVE if self._is_kept(held, saved) else Role.ACTIVATION
            suffix = _GRAPH if found.node is None else ""
            where = {"items": found.item(index), "sliceable": found.sliceable, "suffix": suffix, "frees": frees}
            parameters = [tensor for tensor in (*saved.tensors, *saved.leaves) if type(tensor) is torch.nn.Parameter]
            self._claim(parameters, Role.PARAMETER, found.path, **where)
            self._claim(saved.tensors, role, found.path, **where)
            self._claim(saved.leaves, Role.USER_TENSOR, found.path, **where)
            for leaf in saved.leaves:
                self._claim_gradient(leaf, found.path.child(" → graph → leaf"), None)

    def _nameless(self, tensors: list[Any]) -> list[Any]:
        """Return those that nobody has claimed, once what holds a view has claimed what the view was made of.

        A view keeps that tensor, as a Python object too, and C++ alone knows that it does; as a sparse tensor does with
        its parts.
        """
        nameless = list(self._ledger.unclaimed(tensors))
        bases = {id(tensor): tensor for tensor in held_by_c(nameless, tensors)} if nameless and C_COUNTS else {}
        held = self._ledger.owned(bases.values())
        for views, path, suffix in list(self._claims) if held else ():
            for base in bases_of(views, held):
                if id(base) in bases:
                    self._claim_base(base, path, suffix)
        return self._ledger.unclaimed(nameless)

    def _claim_base(self, base: Any, path: Path, suffix: str) -> None:
        """Claim what the view was made of that stands at ``path``, or that the graph there holds."""
        self._ledger.claim((base,), Role.USER_TENSOR, path, suffix=suffix)
        saved = self._saved_behind(base, path)
        if saved is not None:
            self._claim((*saved.tensors, *saved.leaves, *saved.again), _role_of_graph(path), path, suffix=_GRAPH)

    def _claim_rest(self, tensors: list[Any]) -> None:
        """Claim what no path leads to: temporaries of running code, locals of C++ callers, garbage in a cycle."""
        role = Role.ACTIVATION if self._program.in_step else Role.UNEXPLAINED
        self._claim(tensors, role, _NAMELESS)
        for tensor in compress(tensors, map(_graph_of, tensors)) if not self._skips_graphs else ():
            saved = self._saved_behind(tensor, _NAMELESS)
            if saved is not None:
                self._claim((*saved.tensors, *saved.leaves, *saved.again), role, _NAMELESS, suffix=_GRAPH)

    def _share_arrays(self) -> None:
        """Note which tensors lie in the memory of an array, as ``torch.from_numpy`` makes them."""
        owners = sorted((*bounds_of(array), at) for at, (_, array) in enumerate(self._walk.arrays))
        for tensors, _, _ in self._claims if owners else ():
            for key, _, device, tensor in storages_of(tensors):
                if device.type == "cpu" and is_plain(tensor):
                    begin = begin_of(tensor)
                    after = bisect_right(owners, begin, key=itemgetter(0))
                    if after and begin < owners[after - 1][1]:
                        self._ledger.share(key, Holder(self._walk.arrays[owners[after - 1][2]][0]))

    def _notes(self) -> Iterator[str]:
        packed = self._graphs.packed
        recomputed = sum(count for kind, count in packed.items() if kind.startswith(_CHECKPOINT))
        if recomputed:
            yield (
                f"{recomputed} saved tensors are left out by torch.utils.checkpoint and hold no memory: "
                "backward computes them again"
            )
        for kind, count in packed.items():
            if not kind.startswith(_CHECKPOINT):
                yield f"{count} saved tensors are packed by a hook into {kind}, which shows no tensor"
        if self._fakes:
            yield f"{self._fakes} fake or meta tensors stand for memory that they do not have"
        if self._graphs.is_cut:
            yield f"graphs were followed {DEEPEST:,} nodes deep and no further: freeing them would overflow the stack"
        if self._graphs.is_untold:
            yield "this torch does not tell what graphs hold: a line may free less than it says"
        if self._skips_graphs:
            yield "another thread is in a backward, so what graphs hold was not looked at"
        if self._walk.stopped:
            names = ", ".join(f"`{name}`" for name in self._walk.stopped)
            yield f"there are more objects below {names} than were looked at, so some holders have no name here"


def _role_of_graph(path: Path) -> Role:
    return Role.ACTIVATION if path.root.origin is Origin.FRAME else Role.GRAPH_KEPT_ALIVE


def _within_modules(frames: Sequence[Frame]) -> Iterator[str]:
    """Yield the places of frames, outermost first, that a module with layers or weights has called, or its own."""
    began: set[bool] = set()
    for frame in frames:
        module = frame.values.get("self")
        is_module = kind_of(type(module)) is Kind.MODULE
        if is_module and (registered(module, "_modules") or registered(module, "_parameters")):
            began.add(frame.ends)
        if frame.ends in began:
            yield frame.place


def _stepped(optimizer: Any) -> Iterator[tuple[int, int, Any]]:
    """Yield group, index and parameter of what an optimizer steps, as far as its groups are what torch makes them."""
    groups = (plain_dict(optimizer) or {}).get("param_groups")
    for at, group in enumerate(_items(groups)):
        parameters = dict.get(group, "params") if kind_of(type(group)) is Kind.MAPPING else None
        for index, parameter in enumerate(_items(parameters)):
            if kind_of(type(parameter)) is Kind.TENSOR:
                yield at, index, parameter


def _items(held: Any) -> Sequence[Any]:
    kind = kind_of(type(held))
    return items_of(held, kind) if kind in (Kind.SEQUENCE, Kind.TUPLE) else ()


def _pairs(held: Any) -> list[tuple[Any, Any]]:
    return pairs_of(held, Kind.MAPPING) if kind_of(type(held)) is Kind.MAPPING else []
