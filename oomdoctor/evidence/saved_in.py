"""Which module of the program's a tensor was saved for backward in, told from the autograd graph alone.

A node that computes with a parameter is of the module that has it: the parameter is one of its inputs, as it is or
cast or viewed otherwise, or it saved it. A node without one was made after such a layer (by way of its latest input)
and before the next in time, and counts to the innermost module around both, which runs all that lies between them.
Where a forward has failed before the next layer, the module that was running then stands for it. What several nodes
saved is of a layer among them that has a parameter; what a name or a frame holds and no node saved is of the module
that made it.

Left without a module is what the graph does not tell: what nothing with a parameter follows, a loss as a rule; what
came from layers that no name leads to or that a function written in Python hides; and what was computed with parameters
that have no module in common. Of a parameter that several modules share it is the module around them. A layer whose
parameters are frozen and cast is not seen: it is one of the things between two others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final

import torch

from oomdoctor.evidence.owners import Entry, Ledger
from oomdoctor.model.memory import Role
from oomdoctor.objects.paths import Path
from oomdoctor.objects.storages import LEAF, Graphs, plain_storages, storages_of

_LISTS: Final = frozenset(
    map(id, (torch.nn.ModuleDict, torch.nn.ModuleList, torch.nn.ParameterDict, torch.nn.ParameterList))
)
"""They run nothing themselves."""

_VIEWS: Final = frozenset(
    f"{name}Backward{number}"  # overloads are numbered
    for name in ("Expand", "Permute", "Select", "Slice", "Split", "T", "ToCopy", "Transpose", "UnsafeView", "View")
    for number in (0, 1)
)
"""Nodes by which a weight is cast or seen otherwise before a layer computes with it."""
_MOST_VIEWS: Final = 4
_MOST_OF_LAYER: Final = 2
"""A module with more parameters than a weight and a bias computes in several steps."""


@dataclass(slots=True)
class Modules:
    """The modules that a name leads to, by the ``id`` of their path.

    ``running`` have a forward, and ``composed`` consist of several layers; ``running_last`` is the innermost that was
    running when the program failed.
    """

    named: dict[int, Path] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    composed: set[int] = field(default_factory=set)
    running_last: Path | None = None
    _paths: dict[int, Path] = field(default_factory=dict)

    def add(self, path: Path, module: Any) -> None:
        """Add the module at ``path``."""
        self.named[id(path)] = path
        self._paths[id(module)] = path
        if path.parent is not None:
            self.composed.add(id(path.parent))
        if id(type(module)) not in _LISTS:
            self.running.add(id(path))

    def note_frames(self, modules: Iterable[Any]) -> None:
        """Note which module was running last of those that frames are of, outermost first."""
        for module in modules:
            self.running_last = self._paths.get(id(module), self.running_last)

    def note_parameters(self, path: Path, count: int) -> None:
        """Note that a module has at least so many parameters."""
        if count > _MOST_OF_LAYER:
            self.composed.add(id(path))

    def around(self, path: Path | None) -> Path | None:
        """Return the innermost module that runs what stands at ``path``, None if none does."""
        return next((one for one in _ways_up(path) if id(one) in self.running), None)

    def common(self, first: Path | None, *others: Path | None) -> Path | None:
        """Return the module itself where there is one alone, else the innermost one that runs all of them."""
        for other in others:
            if other is not first:
                above = set(map(id, _ways_up(first)))
                first = next((one for one in _ways_up(other) if id(one) in above and id(one) in self.running), None)
        return first


def note_modules(graphs: Graphs, ledger: Ledger, modules: Modules) -> None:
    """Note with the owners of activations and of graphs kept alive which module each of their storages was saved in."""
    if not modules.named or not graphs.made:
        return
    nodes = _Nodes(graphs, ledger, modules)
    sizes: dict[int, int] = {}
    saved: list[tuple[int, Any]] = []
    for key, size, node in _storages(graphs.saved, graphs.savers):
        owner = ledger.owner(key)
        if owner is None:
            continue
        if owner.role is Role.ACTIVATION or owner.role is Role.GRAPH_KEPT_ALIVE:
            saved.append((key, node))
            sizes[key] = size
        elif owner.role is Role.PARAMETER:
            nodes.meet(node, owner)
    for key, size, node in _storages(graphs.made, graphs.makers):
        owner = ledger.owner(key)
        if key not in sizes and owner is not None and owner.role is Role.ACTIVATION:
            saved.append((key, node))
            sizes[key] = size
    parts: dict[int, tuple[Entry, dict[int, int]]] = {}
    for key, module in nodes.modules(saved):
        owner = ledger.owner(key)
        if owner is not None:
            _, of_module = parts.setdefault(id(owner), (owner, {}))
            of_module[id(module)] = of_module.get(id(module), 0) + sizes[key]
    for owner, of_module in parts.values():
        owner.saved_in = [(modules.named[module], size) for module, size in of_module.items()]


def _storages(tensors: Sequence[Any], nodes: Sequence[Any]) -> Iterable[tuple[int, int, Any]]:
    """Return key and bytes of the storages of ``tensors``, and which of ``nodes`` has saved or made each."""
    columns = plain_storages(tensors)
    if columns is not None:
        return zip(*columns, nodes, strict=True)
    pairs = zip(tensors, nodes, strict=True)
    return ((key, size, node) for tensor, node in pairs for key, size, _, _ in storages_of((tensor,)))


class _Nodes:
    """The modules of nodes. Short-lived: it holds nodes."""

    def __init__(self, graphs: Graphs, ledger: Ledger, modules: Modules) -> None:
        self._graphs = graphs
        self._below = graphs.below
        self._ledger = ledger
        self._modules = modules
        self._own: dict[Any, Path | None] = {}
        """Of nodes that saved a parameter or take one: the module of these. Of those that take nothing: None."""
        self._came_from: dict[Any, Path | None] = {}
        """Of every node the module that it computed with a parameter of, or that its latest input came from."""
        self._layers: list[tuple[int, Any]] = []
        """When nodes were made that compute with parameters, in their order."""
        self._of_owner: dict[int, Path | None] = {}

    def meet(self, node: Any, owner: Entry) -> None:
        module = self._of(owner)
        if node in self._own:
            self._own[node] = self._modules.common(self._own[node], module)
        elif _is_python(node):  # it may compute with more than it saved
            self._own[node] = self._modules.common(module, *self._inputs(node)[0])
        else:
            self._own[node] = module

    def modules(self, saved: list[tuple[int, Any]]) -> Iterator[tuple[int, Path]]:
        """Yield each storage with the module that it was saved in, as far as a node that saved it tells it."""
        layers = {key: own for key, node in saved if (own := self._own.get(node)) is not None}
        others = [(key, node) for key, node in saved if key not in layers]
        tail = self._follow() if others else set()
        found: dict[int, Path] = {}
        for key, node in others:
            if node not in tail and (module := self._of_node(node)) is not None:
                (layers if node in self._own else found)[key] = module
        yield from (found | layers).items()

    def _follow(self) -> set[Any]:
        """Follow all nodes in their order; return those after which no parameter is used, losses as a rule."""
        order = sorted((one for one in self._below if type(one).__name__ != LEAF), key=_when)
        for node in order:
            modules, results = self._inputs(node)
            if node not in self._own and (modules or not results or _is_python(node)):
                self._own[node] = self._modules.common(*modules) if modules else None
            own = node in self._own
            self._came_from[node] = self._own[node] if own else self._came_from.get(max(results, key=_when))
            if self._own.get(node) is not None or any(type(one).__name__ == LEAF for one, _ in self._below[node]):
                self._layers.append((_when(node), node))
        followed = set(self._graphs.inner)
        for node in reversed(order):
            if node in followed or self._own.get(node) is not None:
                followed.update(one for one, _ in self._below[node])
        return {node for node in order if node not in followed and self._own.get(node) is None}

    def _of_node(self, node: Any) -> Path | None:
        layer = self._came_from[node]
        if layer is None or node in self._own:
            return layer
        around = layer if id(layer) in self._modules.composed else self._modules.around(layer.parent)
        # The module of the layer that was run next after the node was made.
        at = bisect_right(self._layers, _when(node), key=itemgetter(0))
        following = self._own.get(self._layers[at][1]) if at < len(self._layers) else None
        return self._modules.common(around, following or self._modules.running_last)

    def _inputs(self, node: Any) -> tuple[list[Path | None], list[Any]]:
        """Return the modules of the parameters that a node takes, None for one of none, and what made the others."""
        modules: list[Path | None] = []
        results: list[Any] = []
        for following, _ in self._below.get(node, ()):
            if following is None:
                continue
            if (leaf := self._leaf(following)) is None:
                results.append(following)
            elif (owner := self._owner(leaf)) is not None and owner.role is Role.PARAMETER:
                modules.append(self._of(owner))
            elif type(leaf) is torch.nn.Parameter:
                modules.append(None)
        return modules, results

    def _leaf(self, node: Any) -> Any:
        """Return the tensor that ``node`` accumulates a gradient for, or that it is a view or a cast of."""
        for _ in range(_MOST_VIEWS):
            name = type(node).__name__
            if name == LEAF:
                return node.variable
            if name not in _VIEWS:
                return None
            node = next((one for one, _ in self._below.get(node, ()) if one is not None), None)
        return None

    def _owner(self, tensor: Any) -> Entry | None:
        return next((self._ledger.owner(key) for key, *_ in storages_of((tensor,))), None)

    def _of(self, owner: Entry) -> Path | None:
        """Return the module that a parameter is of, of one that several share the module around them."""
        if id(owner) not in self._of_owner:
            above = (owner.path.parent, *(holder.path.parent for holder in owner.others.values()))
            modules = [path for path in above if id(path) in self._modules.named]
            self._of_owner[id(owner)] = self._modules.around(self._modules.common(*modules)) if modules else None
        return self._of_owner[id(owner)]


def _is_python(node: Any) -> bool:
    return issubclass(type(node), torch._C._FunctionBase)


def _when(node: Any) -> int:
    """Return when a node was made among those of its thread."""
    return int(type(node)._sequence_nr(node))


def _ways_up(path: Path | None) -> Iterator[Path]:
    while path is not None:
        yield path
        path = path.parent
