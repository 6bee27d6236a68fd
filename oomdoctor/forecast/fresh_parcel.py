"""Packs the user's program for a fresh process: names by value, tensors by what they are without what is in them.

A tensor becomes its shape, strides, dtype, device and whether it requires grad, and the number of the storage that it
lies in, so that views, tied weights and gradients stay what they are to each other. What is in a storage stays behind,
but for few bytes: where it has at most 4 KiB, and of integers and bools up to 4 MiB (32 MiB together), because their
values may steer the program. Code of the notebook goes by value (``cloudpickle``), that of modules by name.

Sent is what the cells mention, with all that it leads to. What is alive besides is sent as its size. Limits: what
pickle refuses, tensors of other classes than torch's own, other layouts; graphs, whose memory is sent and whose way
back is not. Garbage that has not been collected yet counts: to collect it would run code of the user's.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import marshal
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

import cloudpickle  # type: ignore[import-untyped]

from oomdoctor.errors import ForecastError
from oomdoctor.forecast import fresh_tensors
from oomdoctor.forecast.calibration import applied_now
from oomdoctor.forecast.fresh_storages import Storages
from oomdoctor.forecast.fresh_told import Parcel, Surroundings, Told
from oomdoctor.forecast.layout import is_retry
from oomdoctor.forecast.reading import one_sentence
from oomdoctor.forecast.settings import allocator_settings
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.named import is_users
from oomdoctor.program.names import FirstUse, bound_names, first_uses, read_names

if TYPE_CHECKING:
    from oomdoctor.model.session import Attempt, Session
    from oomdoctor.sandbox.card import Card

__all__ = ["NAMESPACE", "SHELL", "attempted", "packed"]

_MOST: Final = 256 << 20
"""Bytes of a pickle. What is more takes the user's process longer than a forecast is worth."""

NAMESPACE: Final = "namespace"
SHELL: Final = "shell"
"""What stands for the namespace and the shell in a pickle."""

_ANY_NAME: Final = frozenset({"globals", "locals", "vars", "eval", "exec"})
"""What a cell mentions that may look at every name."""


def packed(
    session: Session,
    prepare: Callable[[], None],
    work: Any,
    *,
    texts: Sequence[str],
    budget: int | None,
    cached: bool,
    timeout_s: float,
    workers: int,
    card: Card | None,
) -> Parcel:
    """Return the program as a parcel. Nothing of it is changed.

    Args:
        texts: what is going to be run; see ``Shadows`` for the others.

    Raises:
        ForecastError: something that the cell reaches cannot be sent.
    """
    if is_retry(prepare):
        raise ForecastError("the start of the cell cannot be brought back in a fresh process, and fork() is not used")
    job = _job(session, prepare, work)
    storages = Storages(card)
    names, codes = _names(session, texts, storages)
    return Parcel(
        job=job[0],
        names=names,
        storages=tuple(storages.described()),
        roles=tuple(storages.roles),
        pinned=tuple(storages.pinned),
        graphs=tuple(storages.graphs),
        surroundings=_surroundings(session, [*codes, *job[1]]),
        budget=budget,
        cached=cached,
        timeout_s=timeout_s,
        workers=workers,
        card=card,
    )


def attempted(session: Session, prepare: Callable[[], None], attempt: Attempt) -> bytes:
    """Return one attempt as the job of a parcel.

    Raises:
        ForecastError: it cannot be sent.
    """
    return _job(session, prepare, attempt)[0]


def _job(session: Session, prepare: Callable[[], None], work: Any) -> tuple[bytes, list[CodeType]]:
    try:
        return _pickle((session, prepare, work), session, None)
    except ForecastError as error:
        raise ForecastError(f"what is to be tried cannot be sent to a fresh process: {error}") from error


def _names(session: Session, texts: Sequence[str], storages: Storages) -> tuple[bytes, list[CodeType]]:
    """Return the pickle of the names that are reached, and the code in it.

    What a cell that is going to be run reads must go. What it binds anew first, and what the other cells mention, may
    be left out where it cannot be sent.
    """
    namespace = session.namespace
    needed, wanted = frozenset[str](), frozenset[str]()
    for text in texts:
        binds = {name for name, use in first_uses(text).items() if use is FirstUse.BINDS}
        needed |= read_names(text) - binds
        wanted |= bound_names(text)
    for cell in session.cells.history:
        wanted |= read_names(cell.source) | bound_names(cell.source)
    if needed & _ANY_NAME:
        wanted |= frozenset(namespace)
    there = [name for name in namespace if name in needed | wanted and is_users(name)]
    reached = {name: namespace[name] for name in there}
    dunders = {name: namespace[name] for name in ("__name__", "__file__", "__package__") if name in namespace}
    mark = storages.mark()
    try:
        return _pickle(dunders | reached, session, storages)
    except ForecastError:
        storages.back_to(mark)
    for name in there:
        try:
            _pickle({name: namespace[name]}, session, storages)
        except ForecastError as error:
            if name in needed:
                raise ForecastError(f"`{name}` cannot be sent to a fresh process: {error}") from error
            del reached[name]
            storages.pin(namespace[name], namespace)
        finally:
            storages.back_to(mark)
    return _pickle(dunders | reached, session, storages)


def _pickle(value: Any, session: Session, storages: Storages | None) -> tuple[bytes, list[CodeType]]:
    sink = _Sink()
    pickler = _Pickler(sink, session, storages)
    try:
        pickler.dump(value)
    except ForecastError:
        raise
    except Exception as error:  # classes of the user's say how they are pickled, and may raise anything
        raise ForecastError(one_sentence(error)) from error
    return sink.getvalue(), pickler.codes


class _Sink(io.BytesIO):
    """A buffer that is full at some point."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MOST:
            raise ForecastError(f"it is more than {format_size(_MOST)} besides what is in tensors")
        return super().write(data)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends tensors without what is in them.

    Attributes:
        codes: of the functions that went by value.
    """

    def __init__(self, sink: _Sink, session: Session, storages: Storages | None) -> None:
        super().__init__(sink)
        self._namespace, self._shell, self._accelerator = session.namespace, session.shell, session.accelerator
        self._storages = storages
        self.codes: list[CodeType] = []
        # Functions of the cells get the namespace itself for their globals.
        self.globals_ref[id(self._namespace)] = self._namespace

    def persistent_id(self, value: Any) -> str | None:
        """Name what is not sent, because the other side has one of its own."""
        if value is self._namespace:
            return NAMESPACE
        return SHELL if value is self._shell and value is not None else None

    def reducer_override(self, value: Any) -> Any:
        """Return how tensors, storages, code and the accelerator are sent; the rest as ``cloudpickle`` does.

        Code keeps the name of its file, by which its text is found; ``cloudpickle`` 3.1.3 and later drop that.
        """
        if value is self._accelerator:
            return _told(value)
        torch: Any = sys.modules.get("torch")
        kind = type(value)
        if torch is not None and issubclass(kind, (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage)):
            if self._storages is None:
                raise ForecastError("it holds a tensor that no name leads to")
            if issubclass(kind, torch.Tensor):
                return self._storages.tensor(value)
            if issubclass(kind, torch.storage.TypedStorage):
                raise ForecastError("a typed storage is not followed")
            return fresh_tensors.storage, (self._storages.number(value, None),)
        if kind is FunctionType:
            self.codes.append(value.__code__)
        if kind is CodeType:
            return marshal.loads, (marshal.dumps(value),)
        return super().reducer_override(value)


def _told(accelerator: Any) -> Any:
    settings = None
    with contextlib.suppress(ForecastError):  # the fresh process comes to know it by itself
        settings = allocator_settings(accelerator)
    return _tell, (accelerator.name, accelerator.measure, accelerator.read(), settings)


def _tell(name: str, measure: str, memory: Any, settings: Any) -> Told:
    return Told(name=name, measure=measure, memory=memory, settings=settings)


def _surroundings(session: Session, codes: Sequence[CodeType]) -> Surroundings:
    main = sys.modules.get("__main__")
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    of_torch: Any = None
    if torch is not None:
        of_torch = torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()
    return Surroundings(
        argv=tuple(sys.argv),
        is_main=main is not None and session.namespace.get("__name__") == "__main__",
        flags=getattr(getattr(session.shell, "compile", None), "flags", 0),
        sources=_sources(codes),
        random=(
            random.getstate(),
            numpy.random.get_state() if numpy is not None else None,
            bytes(torch.get_rng_state().tolist()) if torch is not None else None,
        ),
        torch=of_torch,
        calibration=applied_now(),
    )


def _sources(codes: Iterable[CodeType]) -> dict[str, Any]:
    """Return the text of what was compiled from no file: that of cells."""
    names = {code.co_filename for code in codes}
    kept = {name: linecache.cache.get(name) for name in names if not Path(name).is_file()}
    return {name: entry for name, entry in kept.items() if entry is not None and len(entry) == 4}
