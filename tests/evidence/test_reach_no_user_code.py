"""What is looked into beside the plain things answers nothing either: each notes that it was asked, and raises."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hostile_objects import CONTAINER, DICT, SPECIAL, answer, armed, hostile, hostile_properties
from test_census import big, taken

import oomdoctor

BYTES = 4 * 4096


def an_exception() -> Any:
    class Broken(ValueError):
        pass

    def fail() -> None:
        inside = big()
        raise Broken(len(inside))

    try:
        fail()
    except Broken as exc:
        made = exc
    hostile(Broken, *SPECIAL, "with_traceback", "add_note")
    hostile_properties(Broken, "__traceback__", "__cause__", "__context__", "args", "__notes__", "__suppress_context__")
    return made


def an_array() -> Any:
    numpy = pytest.importorskip("numpy")

    class Array(numpy.ndarray):  # type: ignore[misc, name-defined]
        pass

    made = big().numpy().view(Array)
    hostile(Array, *SPECIAL, "__array_finalize__", "__array_ufunc__", "__array_function__", "__array_wrap__")
    hostile_properties(Array, "base", "dtype", "flat", "size", "shape")
    return made


def an_array_of_objects() -> Any:
    numpy = pytest.importorskip("numpy")
    made = numpy.empty(2, dtype=object)
    made[0] = an_object_with_a_class()
    return made


def an_object_with_a_class() -> Any:
    class Meta(type):
        pass

    class Owner(metaclass=Meta):
        kept = big()
        described = property(answer("Owner.described"))

    made = Owner()
    hostile(Owner, *SPECIAL)
    hostile(Meta, "__getattribute__", "__repr__", "__instancecheck__", "__subclasscheck__", "__iter__")
    return made


def a_frozen_set() -> Any:
    class Frozen(frozenset[Any]):
        pass

    made = Frozen([big()])
    hostile(Frozen, *CONTAINER, "copy", "union")
    return made


def with_attributes(base: type, *names: str) -> Callable[[], Any]:
    def make() -> Any:
        cls = type("Mine", (base,), {})
        made = cls()
        made.kept = big()
        hostile(cls, *names)
        return made

    return make


def a_key() -> Any:
    class Key:
        def __init__(self) -> None:
            self.kept = big()

    made = {Key(): 1, (Key(), "text"): 2}
    hostile(Key, *SPECIAL)
    return made


def a_tensor_with_more() -> Any:
    class More:
        def __init__(self) -> None:
            self.kept = big()

        def __call__(self, gradient: Any) -> Any:
            return gradient

    made = torch.ones(1, requires_grad=True)
    made.more = More()  # type: ignore[attr-defined]
    made.register_hook(More())
    hostile(More, *SPECIAL)
    return made


def a_node() -> Any:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.kept = an_object_with_a_class()
            ctx.save_for_backward(big())
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    made = Own.apply(torch.ones(1, requires_grad=True)).grad_fn
    hostile_properties(type(made), "saved_tensors", "needs_input_grad")
    return made


def a_storage() -> Any:
    class Storage(torch.UntypedStorage):
        pass

    made = Storage(BYTES)
    hostile(Storage, *SPECIAL, "nbytes", "size", "data_ptr", "tolist", "untyped")
    hostile_properties(Storage, "device", "is_cuda", "_cdata")
    return made


async def waiting() -> None:
    deep = big()
    await Awaited()
    deep.sum()


class Awaited:
    def __await__(self) -> Any:
        held = big()
        while True:
            yield held


def a_coroutine() -> Any:
    made = waiting()
    made.send(None)
    return made


OBJECTS = (
    *(an_exception, an_array, an_array_of_objects, an_object_with_a_class, a_frozen_set, a_key, a_tensor_with_more),
    *(a_node, a_storage, with_attributes(dict, *DICT), with_attributes(list, *CONTAINER)),
    *(with_attributes(set, *CONTAINER), with_attributes(tuple, *CONTAINER), with_attributes(deque, *CONTAINER)),
    a_coroutine,
)


@pytest.mark.parametrize("make", OBJECTS)
@pytest.mark.parametrize("many", [1, 300])
def test_a_report_asks_them_nothing_and_finds_what_they_hold(make: Callable[[], Any], many: int) -> None:
    namespace = {"__name__": "__main__", "torch": torch, "thing": make(), "things": [make() for _ in range(many)]}
    try:
        with armed() as calls:
            oomdoctor.report(namespace)
            found = taken(namespace)
        assert calls == []
        held = [one.bytes for one in found.holdings if one.path.startswith("thing")]
        assert sum(held) >= (many + 1) * BYTES
        assert sum(one.bytes for one in found.holdings if one.path.startswith("things")) >= many * BYTES
    finally:
        for one in [namespace["thing"], *namespace["things"]] if make is a_coroutine else ():
            one.close()
