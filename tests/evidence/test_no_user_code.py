"""Collecting runs none of the user's code, dispatches no operation and allocates nothing.

Each object here answers whatever it is asked by noting that it was asked, and by raising. It lives under a name, in
containers, as an attribute, in a closure, and in the locals of frames that failed.
"""

from __future__ import annotations

import gc
import multiprocessing.process
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import hostile_objects as objects
import pytest
import torch
from hostile_objects import OBJECTS, Ran, armed, asked
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import oomdoctor
from oomdoctor import pipeline
from oomdoctor.evidence import _processes
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.session import Cell, Cells

CELL = """\
losses = []
for batch in loader:
    losses.append(train_step(batch, thing))
"""
FILENAME = "<ipython-input-1-hostile>"


class Holder:
    """A plain object of the user's."""

    def __init__(self, held: Any) -> None:
        self.held = held


def a_namespace(make: Callable[[], Any]) -> dict[str, Any]:
    """Return a namespace with objects of a kind in all places that a program has."""
    inside = make()

    def closure() -> Any:
        return inside

    names = {
        "thing": make(),
        "things": [make()],
        "table": {"row": [make()]},
        "pair": (make(), 1),
        "holder": Holder(make()),
    }
    return {"__name__": "__main__", "torch": torch, "_oh": {3: make()}, "_": make(), "function": closure, **names}


def failing(make: Callable[[], Any], namespace: dict[str, Any]) -> BaseException:
    """Return a failure with objects of a kind in the locals of its frames."""
    namespace.update(make=make, Holder=Holder, torch=torch)
    namespace.setdefault("thing", None)
    source = """\
def train_step(batch, thing):
    local, items, owner = make(), [make()], Holder(make())
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

train_step(make(), thing)
"""
    try:
        exec(compile(source, FILENAME, "exec"), namespace)
    except torch.OutOfMemoryError as exc:
        return exc
    raise AssertionError


def observe(exc: BaseException, namespace: dict[str, Any]) -> Evidence:
    cells = Cells(history=(Cell(number=1, source=CELL),))
    case, _ = pipeline.observe(exc, lambda on: pipeline.open_session(namespace, cells, on), {FILENAME: 1})
    return case.evidence


# The tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OBJECTS)
def test_a_report_asks_the_users_objects_nothing(make: Callable[[], Any]) -> None:
    namespace = a_namespace(make)
    with armed() as calls:
        oomdoctor.report(namespace, Cells(history=(Cell(number=1, source=CELL),)))
    assert calls == []


@pytest.mark.parametrize("make", OBJECTS)
def test_a_failure_is_observed_without_asking_them(make: Callable[[], Any]) -> None:
    namespace = a_namespace(make)
    exc = failing(make, namespace)
    with armed() as calls:
        observe(exc, namespace)
    assert calls == []


def _derived(names: dict[str, Any]) -> dict[str, Any]:
    class Namespace(dict[str, Any]):
        pass

    made = Namespace(names)
    objects.hostile(Namespace, *objects.DICT)
    return made


def _of_odd_names(names: dict[str, Any]) -> dict[str, Any]:
    class Text(str):
        __slots__ = ()

    made: dict[str, Any] = {Text(name): value for name, value in names.items()}
    made |= {Text(name): torch.ones(8) for name in ("loader", "batch", "_oh", "__file__")}
    objects.hostile(Text, *objects.SPECIAL, "partition", "startswith", "isidentifier")
    return made


def _of_an_odd_home(names: dict[str, Any]) -> dict[str, Any]:
    class Text(str):
        __slots__ = ()

    made = {**names, "__name__": Text("__main__"), "__file__": Text("a.py"), "Owner": type("Owner", (), {"held": 1})}
    objects.hostile(Text, *objects.SPECIAL, "partition", "startswith")
    return made


@pytest.mark.parametrize("make", [_derived, _of_odd_names, _of_an_odd_home])
def test_a_namespace_is_asked_nothing(make: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    plain = {"__name__": "__main__", "model": nn.Linear(2, 2), "kept": [torch.ones(8)]}
    namespace = make(plain)
    # A dict of another class is no globals of a frame.
    exc = None if type(namespace) is not dict else failing(lambda: torch.ones(8), namespace)
    with armed() as calls:
        oomdoctor.report(namespace)
        if exc is not None:
            observe(exc, namespace)
    assert calls == []


HOLDERS = (
    *(objects.an_object, objects.with_descriptors, objects.a_dict, objects.an_ordered_dict, objects.a_list),
    *(objects.a_tuple, objects.a_deque, objects.keys, objects.names_of_attributes, objects.defaults_of_a_function),
)


@pytest.mark.parametrize("make", HOLDERS)
def test_what_they_hold_is_found_all_the_same(make: Callable[[], Any]) -> None:
    gc.collect()
    before = oomdoctor.report({}).evidence.census.found
    namespace = a_namespace(make)
    with armed():
        census = oomdoctor.report(namespace).evidence.census
    assert census.found - before >= 6 * torch.ones(8).nbytes
    assert any(holding.path.startswith("thing") for holding in census.holdings)


def test_an_object_is_noticed_when_it_is_asked() -> None:
    with pytest.raises(Ran), armed() as calls:
        repr(objects.an_object())
    assert calls == ["Object.__repr__"]


def test_nothing_dies_and_nothing_is_kept() -> None:
    died: list[str] = []

    class Mortal:
        def __init__(self) -> None:
            self.inner = torch.ones(8)

        def __del__(self) -> None:
            died.append("died")

    namespace = {"thing": Mortal(), "things": [Mortal()]}
    exc = failing(Mortal, namespace)
    del namespace["make"]
    gc.disable()  # memory must not wait for the garbage collector
    try:
        evidence = oomdoctor.report(namespace).evidence, observe(exc, namespace)
        assert died == []
        exc.__traceback__ = None
        namespace.clear()
        assert len(died) == 6  # two of the names, and four that the frames held
    finally:
        gc.enable()
    assert all(evidence)


@pytest.mark.parametrize("plain", [True, False])
def test_workers_are_named_without_asking_their_loader(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Number(int):
        pass

    class Text(str):
        __slots__ = ()

    loader = DataLoader([1, 2])
    loader.__dict__["num_workers"] = 1 if plain else Number(1)
    process = Holder(None)
    vars(process).update(_name=Text("Process-1"), _popen=Holder(None))
    vars(vars(process)["_popen"])["pid"] = 4_000_000
    iterator = object.__new__(torch.utils.data.dataloader._MultiProcessingDataLoaderIter)
    vars(iterator).update(_workers=[process], _shutdown=True, _dataset=loader.dataset)
    vars(iterator)["_num_workers"] = 1 if plain else Number(1)
    for cls in (Number, Text):
        objects.hostile(cls, *objects.SPECIAL)
    monkeypatch.setattr(multiprocessing.process, "_children", {process})
    monkeypatch.setattr(sys.modules["__main__"], "a_loader", loader, raising=False)
    with armed() as calls:
        found = _processes.names()
    assert calls == []
    assert found == {4_000_000: "DataLoader worker 0" + (" of a_loader" if plain else "")}


class Modes:
    """Modes of the user's, which are code of the user's."""

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(f"dispatch {func}")
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(f"function {func}")
            return func(*args, **(kwargs or {}))


def a_program() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.BatchNorm1d(64), nn.LSTM(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 64)
    model(x)[0].sum().backward()
    optimizer.step()
    output, _ = model(x)
    history = [model(x)[0].sum() for _ in range(3)]
    return {"model": model, "optimizer": optimizer, "x": x, "output": output, "history": history}


def test_modes_of_the_users_are_not_shown_what_we_do() -> None:
    namespace = a_program()
    with Modes.Dispatch(), Modes.Function():
        exc = failing(lambda: torch.ones(8), namespace)
        oomdoctor.report(namespace)  # the first time, modules of ours are imported
        asked.clear()
        oomdoctor.report(namespace)
        observe(exc, namespace)
        assert asked == []
        torch.ones(8).add(1)
        assert asked != []


def operations(do: Callable[[], object]) -> list[str]:
    """Return the operations that ``do`` runs, by the record of the profiler, which no mode hides."""
    with torch.autograd.profiler.profile() as profile:
        do()
    return [event.name for event in profile.function_events if event.name.startswith("aten::")]


def test_no_operation_is_run_and_nothing_is_allocated() -> None:
    with oomdoctor.simulate("256MiB") as accelerator:
        namespace = a_program()
        exc = failing(lambda: torch.ones(8), namespace)
        gc.collect()
        before = accelerator.read()
        assert operations(lambda: oomdoctor.report(namespace)) == []
        assert operations(lambda: observe(exc, namespace)) == []
        after = accelerator.read()
        assert operations(lambda: torch.ones(8).add(1)) != []
    assert (after.allocated, after.reserved) == (before.allocated, before.reserved)
    assert after.peak_allocated == before.peak_allocated


def test_no_device_is_initialised() -> None:
    was = torch.cuda.is_initialized()
    oomdoctor.report(a_program())
    assert torch.cuda.is_initialized() is was


def test_the_traceback_of_the_failure_is_left_as_it_was() -> None:
    namespace = a_program()
    exc = failing(lambda: torch.ones(8), namespace)

    def frames(traceback: TracebackType | None) -> list[tuple[int, int]]:
        return [] if traceback is None else [(id(traceback.tb_frame), traceback.tb_lineno), *frames(traceback.tb_next)]

    before = frames(exc.__traceback__)
    observe(exc, namespace)
    assert frames(exc.__traceback__) == before
    assert exc.__traceback__ is not None
