"""What objects hold beside the plain things: each by the path that a user would type."""

from __future__ import annotations

import asyncio
import gc
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from capabilities import tells_saved
from test_census import big, holding, taken
from torch import nn

from oomdoctor.model.memory import Census, Role

BYTES = 4 * 4096


def leads(found: Census, path: str, namespace: dict[str, Any]) -> Any:
    """Return what the expression of a holding of one big tensor evaluates to."""
    held = holding(found, path)
    assert held.bytes == BYTES
    assert held.expression is not None
    return eval(held.expression, dict(namespace))


def test_a_list_with_empty_places_in_an_object_made_in_c_is_passed_over() -> None:
    parser = ElementTree.XMLPullParser()
    parser.feed("<a>")  # its stack is a list of twenty, of which one is filled
    assert holding(taken({"parser": parser, "t": big()}), "t").bytes == BYTES


# Without a tensor ----------------------------------------------------------------------------------------------------


def test_bare_storages_are_told() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        namespace = {"s": big().untyped_storage(), "many": [big().untyped_storage()], "typed": big().storage()}
    found = taken(namespace)
    for path in ("s", "many[0]", "typed._untyped_storage"):
        assert leads(found, path, namespace).nbytes() == BYTES
        assert holding(found, path).dtype is None
    assert holding(found, "s").frees == "del s"


def test_a_storage_is_that_of_the_tensor_that_lies_in_it() -> None:
    tensor = big()
    found = taken({"s": tensor.untyped_storage(), "tensor": tensor})
    assert "s" not in {one.path for one in found.holdings}
    assert set(str(holding(found, "tensor").frees).removeprefix("del ").split(", ")) == {"tensor", "s"}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


@pytest.mark.parametrize("many", [1, 300])
@pytest.mark.parametrize("wrap", [lambda x: x.exp().sum(), lambda x: Doubled.apply(x.exp())], ids=["c++", "python"])
@tells_saved
def test_a_node_of_a_graph_leads_to_what_the_graph_holds(wrap: Any, many: int) -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    nodes = [wrap(torch.ones(512, 8) @ weight).grad_fn for _ in range(many)]
    namespace: dict[str, Any] = {"node": nodes[0]} if many == 1 else {"nodes": nodes}
    found = taken(namespace | {"weight": weight})
    held = holding(found, "node" if many == 1 else "nodes[299]")
    assert held.role is Role.GRAPH_KEPT_ALIVE
    assert held.bytes >= BYTES
    assert found.bytes_of(Role.GRAPH_KEPT_ALIVE) >= many * BYTES
    assert held.frees == ("del node" if many == 1 else "del nodes")


# Beside the items ----------------------------------------------------------------------------------------------------


def test_what_is_set_on_tensors_is_told() -> None:
    model, alone = nn.Linear(8, 8), big(3)
    model.weight.main_grad = big()
    alone.note = {"deep": [big()]}
    many = [big(2) for _ in range(300)]
    many[299].note = big()
    namespace = {"model": model, "alone": alone, "many": many}
    found = taken(namespace)
    assert leads(found, "model.weight.main_grad", namespace) is model.weight.main_grad
    assert holding(found, "model.weight.main_grad").role is Role.GRADIENT
    assert holding(found, "model.weight.main_grad").frees == "model.weight.main_grad = None"
    assert leads(found, "alone.note['deep'][0]", namespace).nbytes == BYTES
    assert leads(found, "many[299].note", namespace).nbytes == BYTES
    assert holding(found, "many[0:300]").count == 300


def test_hooks_of_tensors_are_looked_into() -> None:
    def scaled(by: torch.Tensor) -> Any:
        return lambda gradient: gradient * by

    model, kept = nn.Linear(8, 8), torch.ones(4, requires_grad=True)
    model.weight.register_hook(scaled(big()))
    kept.register_post_accumulate_grad_hook(scaled(big()))
    found = taken({"model": model, "kept": kept})
    paths = {one.path for one in found.holdings if one.bytes == BYTES and "no name" not in one.path}
    assert {path.split("[")[0] for path in paths} == {
        "model.weight._backward_hooks",
        "kept._post_accumulate_grad_hooks",
    }


def test_arrays_that_lie_in_a_tensor_lead_to_it() -> None:
    numpy = pytest.importorskip("numpy")
    things = numpy.empty(2, dtype=object)
    things[1] = big()
    namespace = {"a": big().numpy()[1:], "rows": [big().numpy() for _ in range(300)], "things": things}
    found = taken(namespace)
    assert leads(found, "a.base.base", namespace).nbytes == BYTES
    assert leads(found, "rows[299].base", namespace).nbytes == BYTES
    assert leads(found, "things.flat[1]", namespace).nbytes == BYTES


def failing(depth: int) -> None:
    inside = big()
    if depth:
        failing(depth - 1)
    raise ValueError(len(inside))


def a_saved_error(depth: int = 0) -> BaseException:
    try:
        failing(depth)
    except ValueError as exc:
        return exc
    raise AssertionError


def test_exceptions_that_are_kept_hold_the_locals_of_their_frames() -> None:
    errors = [a_saved_error(), a_saved_error(1)]
    wrapped = RuntimeError("again")
    wrapped.__cause__ = a_saved_error()
    namespace = {"errors": errors, "wrapped": wrapped, "trace": a_saved_error().__traceback__}
    found = taken(namespace)
    frame = ".tb_next.tb_frame.f_locals['inside']"
    for path in (
        *(f"errors[0].__traceback__{frame}", f"errors[1].__traceback__{frame}"),
        *(f"errors[1].__traceback__.tb_next{frame}", f"wrapped.__cause__.__traceback__{frame}", f"trace{frame}"),
    ):
        assert leads(found, path, namespace).nbytes == BYTES
        assert holding(found, path).role is Role.TRACEBACK


def test_tensors_on_tensors_in_tracebacks_in_large_containers_are_found() -> None:
    errors = [a_saved_error() for _ in range(300)]
    inside = errors[7].__traceback__.tb_next.tb_frame.f_locals["inside"]  # type: ignore[union-attr]
    inside.note = [big(5) for _ in range(2)]
    del inside
    found = taken({"errors": errors})
    way = "errors[7].__traceback__.tb_next.tb_frame.f_locals['inside']"
    assert holding(found, way).bytes == BYTES
    assert holding(found, f"{way}.note[1]").bytes == 20
    assert found.bytes_of(Role.TRACEBACK) == 300 * BYTES + 40


def test_what_a_saved_exception_shares_with_a_name_is_the_names() -> None:
    def fail(model: nn.Module, rows: torch.Tensor) -> None:
        raise ValueError(len(rows))

    namespace: dict[str, Any] = {"model": nn.Linear(8, 8), "rows": big()}
    with pytest.raises(ValueError, match="4096") as caught:
        fail(**namespace)
    found = taken({"error": caught.value} | namespace)
    assert found.bytes_of(Role.TRACEBACK) == 0
    assert holding(found, "rows").role is Role.USER_TENSOR
    assert holding(found, "model.weight").role is Role.PARAMETER


def with_a_cache(base: type, *args: Any) -> Any:
    made = type("Mine", (base,), {})(*args)
    made.cache = big()
    return made


class SlottedList(list[Any]):
    __slots__ = ("kept",)


@pytest.mark.parametrize(
    "make",
    [
        *(lambda base=base: with_a_cache(base) for base in (dict, list, set, tuple, frozenset, deque, OrderedDict)),
        lambda: with_a_cache(list, range(1000)),
        lambda: with_a_cache(list, [big(1) for _ in range(10)]),
        lambda: with_a_cache(dict, {number: (number, {}) for number in range(1000)}),
    ],
)
def test_containers_of_a_class_of_their_own_have_attributes(make: Any) -> None:
    namespace = {"it": make()}
    assert leads(taken(namespace), "it.cache", namespace) is namespace["it"].cache


def test_items_and_attributes_of_one_container_are_both_told() -> None:
    it = SlottedList([big()])
    it.kept = big()
    table: Any = defaultdict(big)
    table.default_factory = [big()].pop
    found = taken({"it": it, "table": table})
    assert {"it[0]", "it.kept"} <= {one.path for one in found.holdings}
    assert any(one.path.startswith("table.default_factory.__self__") for one in found.holdings)


def test_frozen_sets_keys_and_bound_builtins_hold_tensors() -> None:
    namespace = {
        "frozen": frozenset({big()}),
        "many": {("key", frozenset({big()})): number for number in range(300)},
        "f": big().add_,
        "keys": {big(): 1},
    }
    found = taken(namespace)
    assert holding(found, "frozen → element").bytes == BYTES
    assert sum(one.bytes for one in found.holdings if one.path == "many → key[1] → element") == 300 * BYTES
    assert leads(found, "f.__self__", namespace).nbytes == BYTES
    assert holding(found, "keys → key").bytes == BYTES


class Base:
    cache: list[torch.Tensor] = [big()]  # noqa: RUF012


class Derived(Base):
    kept = big()

    def method(self) -> None:
        """Is no memory."""


class Model(nn.Module):
    table = big()


def test_what_classes_of_the_program_hold_is_found_through_what_is_made_of_them() -> None:
    namespace: dict[str, Any] = {"it": Derived(), "models": [Model()]}
    found = taken(namespace)
    assert leads(found, "it.__class__.__mro__[1].cache[0]", namespace) is Base.cache[0]
    assert leads(found, "it.__class__.kept", namespace) is Derived.kept
    assert leads(found, "models[0].__class__.table", namespace) is Model.table
    assert holding(found, "it.__class__.kept").frees == "del it.__class__.kept"


def test_the_failure_at_hand_is_no_saved_exception_though_a_name_holds_it() -> None:
    error = a_saved_error()
    found = taken({"error": error, "deep": {"a": {"b": {"c": {"d": big(7)}}}}}, error)
    (inside,) = (one for one in found.holdings if one.path.startswith("local `inside` of failing"))
    assert (inside.bytes, inside.role) == (BYTES, Role.ACTIVATION)
    assert found.bytes_of(Role.TRACEBACK) == 0


# What waits ----------------------------------------------------------------------------------------------------------


def inner() -> Any:
    deep = big()
    yield len(deep)


def outer() -> Any:
    yield from inner()


class Pause:
    def __await__(self) -> Any:
        yield


async def waits() -> None:
    deep = big()
    await Pause()
    deep.sum()


async def calls() -> None:
    await waits()


async def produces() -> Any:
    deep = big()
    yield 1
    yield deep


def test_frames_that_wait_for_others_lead_to_those() -> None:
    generator, coroutine, asynchronous = outer(), calls(), produces()
    next(generator)
    coroutine.send(None)
    with pytest.raises(StopIteration):
        asynchronous.__anext__().send(None)
    namespace = {"generator": generator, "coroutine": coroutine, "asynchronous": asynchronous}
    try:
        found = taken(namespace)
        for path in (
            "generator.gi_yieldfrom.gi_frame.f_locals['deep']",
            "coroutine.cr_await.cr_frame.f_locals['deep']",
            "asynchronous.ag_frame.f_locals['deep']",
        ):
            assert leads(found, path, namespace).nbytes == BYTES
    finally:
        coroutine.close()
        asyncio.run(asynchronous.aclose())


# How far -------------------------------------------------------------------------------------------------------------


def test_many_samples_are_told_whole() -> None:
    rows = [(torch.ones(2), number) for number in range(60_000)]
    found = taken({"rows": rows, "others": [{"x": number, "y": big(3)} for number in range(300)]})
    assert holding(found, "rows → items").bytes == 60_000 * 8
    assert (holding(found, "rows → items").count, holding(found, "rows → items").expression) == (60_000, "rows")
    assert holding(found, "others[299]['y']").bytes == 12
    assert not [note for note in found.notes if "more objects" in note]


def test_a_container_that_leads_to_too_much_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oomdoctor.objects.walk._MOST_OBJECTS", 2000)
    endless: list[Any] = [[(lambda n=n: n, big(1)) for n in range(100)] for _ in range(120)]
    deep = {f"{a}": {f"{b}": [b, print, {}] for b in range(50)} for a in range(100)}
    rows = [{"x": number, "y": big(2), "f": print} for number in range(300)]
    found = taken({"endless": endless, "deep": deep, "rows": rows})
    assert holding(found, "rows[299]['y']").bytes == 8
    (note,) = (note for note in found.notes if "more objects" in note)
    assert "`endless`" in note
    assert "`rows`" not in note


def test_what_a_saved_exception_holds_goes_with_it() -> None:
    namespace = {"error": a_saved_error()}
    watched = weakref.ref(namespace["error"].__traceback__.tb_next.tb_frame.f_locals["inside"])  # type: ignore[union-attr]
    gc.collect()
    gc.disable()  # it must not wait for the garbage collector
    try:
        taken(namespace)
        assert watched() is not None
        namespace.clear()
        assert watched() is None
    finally:
        gc.enable()
