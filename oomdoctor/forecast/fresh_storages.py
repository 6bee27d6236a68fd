"""The memory behind the tensors that are sent to a fresh process: what there is of it, and what goes along."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.errors import ForecastError
from oomdoctor.forecast import fresh_tensors
from oomdoctor.forecast.fresh_told import Described

if TYPE_CHECKING:
    from oomdoctor.model.memory import Role
    from oomdoctor.sandbox.card import Card

__all__ = ["Storages"]

_ALWAYS: Final = 4 << 10
_VALUES: Final = 4 << 20
_ALL_VALUES: Final = 32 << 20
"""Bytes of a storage that are sent in any case, of one of integers or bools, and of all of them."""

_MOST_PINNED: Final = 200_000
"""Objects that are looked at for what is not sent."""


class Storages:
    """The storages that are sent, by their numbers: those of a survey of this process first, in its order.

    Attributes:
        roles, pinned, graphs: see ``Parcel``.
    """

    def __init__(self, card: Card | None) -> None:
        self.roles: list[tuple[int, Role]] = []
        self.pinned: set[int] = set()
        self.graphs: list[tuple[int, ...]] = []
        self._card = card
        self._found: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._steering: set[int] = set()
        if "torch" in sys.modules:
            self._survey()

    def _survey(self) -> None:
        from oomdoctor.forecast.survey import alive, live_storages

        for storage, role in live_storages(alive()):
            if storage.device.type != "meta":
                number = self._numbered(storage)
                if role is not None:
                    self.roles.append((number, role))

    def mark(self) -> int:
        """Return where ``back_to`` goes back to."""
        return len(self.graphs)

    def back_to(self, mark: int) -> None:
        """Forget what was described since; storages keep their numbers, and go as what is alive besides."""
        del self.graphs[mark:]

    def number(self, storage: Any, dtype: Any) -> int:
        """Return the number of a storage that is seen as tensors of ``dtype``."""
        number = self._numbered(storage)
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            self._steering.add(number)
        return number

    def _numbered(self, storage: Any) -> int:
        found = self._numbers.get(storage._cdata)
        if found is None:
            device = storage.device
            if device.type not in ("cpu", "meta") and (self._card is None or device != self._card.device):
                raise ForecastError(f"a tensor lives on {device}, which is not forecast in a fresh process")
            found = self._numbers[storage._cdata] = len(self._found)
            self._found.append(storage)
        return found

    def tensor(self, tensor: Any) -> Any:
        """Return how a tensor is made again."""
        import torch

        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise ForecastError(f"a tensor of the class {type(tensor).__qualname__} is not followed")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise ForecastError(f"a tensor of the layout {tensor.layout} is not followed")
        graph, leaves = None, None
        if tensor.grad_fn is not None:
            from oomdoctor.forecast.survey import saved_by

            graph, leaves = len(self.graphs), _leaves(tensor.grad_fn)
            self.graphs.append(tuple(self.number(one, None) for one in saved_by([tensor.grad_fn])))
        number = self.number(tensor.untyped_storage(), tensor.dtype)
        described = (number, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        is_parameter = type(tensor) is torch.nn.Parameter
        hooks = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
        state = (tensor.grad if tensor.is_leaf else None, tensor.__dict__ or None, *hooks, leaves)
        made = (*described, tensor.requires_grad, is_parameter, graph)
        return fresh_tensors.tensor, made, state, None, None, fresh_tensors.complete

    def pin(self, value: Any, namespace: dict[str, Any]) -> None:
        """Have what ``value`` leads to live as long as the shadow does; of very much, only a part is looked at."""
        import torch

        from oomdoctor.forecast.survey import saved_by

        todo = [value]
        seen = {
            id(namespace),
            *(id(vars(module)) for module in list(sys.modules.values()) if type(module) is ModuleType),
        }
        while todo and len(seen) < _MOST_PINNED:
            one = todo.pop()
            if id(one) in seen or issubclass(type(one), (type, ModuleType)):
                continue
            seen.add(id(one))
            if issubclass(type(one), torch.Tensor) and one.layout is torch.strided:
                self.pinned.add(self._numbered(one.untyped_storage()))
                if one.grad_fn is not None:
                    self.pinned.update(map(self._numbered, saved_by([one.grad_fn])))
                    todo += _leaves(one.grad_fn)
                elif one.grad is not None:
                    todo.append(one.grad)
            todo += gc.get_referents(one)

    def described(self) -> Iterable[Described]:
        """Yield the storages in the order of their numbers."""
        left = _ALL_VALUES
        for number, storage in enumerate(self._found):
            nbytes, device = storage.nbytes(), str(storage.device)
            most = min(_VALUES, left) if number in self._steering else _ALWAYS
            data = None
            if storage.device.type == "cpu" and nbytes <= most:
                data = ctypes.string_at(storage.data_ptr(), nbytes) if nbytes else b""
                left -= nbytes
            yield Described(nbytes=nbytes, device=device, data=data)


def _leaves(node: Any) -> list[Any]:
    """Return the tensors that a graph begins with, which it keeps with their gradients."""
    found, todo, seen = [], [node], {node}
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        todo += following
    return found
