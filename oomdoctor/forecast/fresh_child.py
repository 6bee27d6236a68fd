"""The fresh process: makes the program again from its parcel, and has shadows run as a forked copy has.

It is what the nursery is where the user's process cannot be forked, or not without danger. It loads what it needs, and
then works as the other does, with the same walls, limits and answers (see ``nursery``). The namespace is made anew in
each shadow, on the fakes of that shadow.
"""

from __future__ import annotations

import builtins
import gc
import io
import linecache
import os
import pickle
import random
import sys
import tempfile
import threading
import time
from collections.abc import Hashable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from oomdoctor.errors import ForecastError
from oomdoctor.forecast import calibration
from oomdoctor.forecast.fresh_shadows import FreshShadows
from oomdoctor.forecast.fresh_tensors import UNSENT, Making, making
from oomdoctor.forecast.fresh_told import Parcel
from oomdoctor.forecast.reading import Reading, one_sentence
from oomdoctor.forecast.shadow import Shadows
from oomdoctor.forecast.ways import answer_otherwise
from oomdoctor.model.sizes import format_size

if TYPE_CHECKING:
    from oomdoctor.forecast.pace import Pace
    from oomdoctor.forecast.tracker import Tracker
    from oomdoctor.model.session import Attempt
    from oomdoctor.sandbox.card import Card

__all__ = ["main"]

_kept: list[Any] = []
"""What nothing of the program leads to, and is alive all the same."""
_DUNDER_MAIN: Final = "__main__"


def main() -> None:
    """Take the parcel from standard input, and answer on what is standard output until then."""
    writer = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    # Modules ask for it when they are loaded, and finding one out would be a write.
    tempfile.tempdir = next(filter(None, map(os.environ.get, ("TMPDIR", "TEMP"))), "/tmp")
    from oomdoctor.forecast import nursery
    from oomdoctor.sandbox.walls import raise_limits

    raise_limits()

    try:
        program = Program(pickle.load(sys.stdin.buffer))
        _end_with_parent()
        work = program.open()
    except BaseException as error:  # noqa: BLE001  nothing may leave this process but by its pipe
        why = str(error) if isinstance(error, ForecastError) else one_sentence(error)
        nursery.fail(writer, f"the program could not be made again in a fresh process: {why}")
        os._exit(0)
    with calibration.applied(program.calibration):
        if program.is_one_attempt:
            nursery.live(lambda _: iter([program.run(work)]), None, writer)
        nursery.live(work, program.shadows(), writer)


def _end_with_parent() -> None:
    """End this process and what it has begun as soon as nobody holds the other end of standard input."""
    reader = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the cell reads nothing of the parcel's

    def watch() -> None:
        while os.read(reader, 1):
            pass
        if hasattr(os, "killpg"):
            os.killpg(0, 9)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Program:
    """The user's program, as it is made again.

    Attributes:
        session: with a namespace that is empty until ``arrive``.
        calibration: what is applied to forecasts.
        is_one_attempt: whether this process runs one shadow itself.
    """

    def __init__(self, parcel: Parcel) -> None:
        self._parcel = parcel
        self._is_for_shadows = parcel.way is not None or hasattr(os, "fork")
        self.session: Any = None
        self.calibration = parcel.surroundings.calibration
        self.is_one_attempt = parcel.way is not None
        self._prepare: Any = None
        self._module = ModuleType(_DUNDER_MAIN)
        self._shell = SimpleNamespace(compile=SimpleNamespace(flags=parcel.surroundings.flags))

    def open(self) -> Any:
        """Load what the program needs, and return what is to be done with it."""
        self._settle_in()
        self.session, self._prepare, work = _Unpickler(self, self._parcel.job).load()
        if self._is_for_shadows:
            self._try()
        return work

    def shadows(self) -> Any:
        """Return the shadows of this process."""
        parcel = self._parcel
        if not hasattr(os, "fork"):
            return FreshShadows(parcel, self.session, self._prepare)
        return _Shadows(
            *(self.session, self._prepare),
            program=self,
            budget=parcel.budget,
            cached=parcel.cached,
            timeout_s=parcel.timeout_s,
            workers=parcel.workers,
            card=_told_alone(parcel.card),
        )

    def run(self, attempt: Attempt) -> Reading:
        """Run one attempt in this process, which is of no use for anything else afterwards."""
        from oomdoctor.forecast import child

        parcel, card = self._parcel, _told_alone(self._parcel.card)
        if parcel.way is False:
            answer_otherwise()
        child.warm_up()
        begun = time.monotonic()
        try:
            start = child.bring_back(self._prepare, self.names, card)
        except ForecastError as error:
            return Reading(why=str(error))
        start.arrive = lambda tracker, pace: self.arrive(start, tracker, pace)
        return child.run(
            *(self.session, attempt, start),
            budget=parcel.budget,
            cached=parcel.cached,
            card=card,
            time_s=parcel.timeout_s - (time.monotonic() - begun),
        )

    def _settle_in(self) -> None:
        """Make this process what the other one was beside its namespace."""
        told = self._parcel.surroundings
        sys.argv[:] = told.argv
        linecache.cache.update(told.sources)
        names: Any = builtins
        names.display = lambda *_args, **_kwargs: None
        names.get_ipython = lambda: self._shell
        self._module.__dict__.clear()
        if told.is_main:
            sys.modules[_DUNDER_MAIN] = self._module
        if told.torch is not None and self._is_for_shadows:
            import torch

            threads, dtype, _ = told.torch
            torch.set_num_threads(threads)
            torch.set_default_dtype(getattr(torch, dtype.partition(".")[2]))

    def _try(self) -> None:
        """Make the program once, so that all of its modules are loaded, and throw it away."""
        if not self._parcel.storages and "torch" not in sys.modules:
            _Unpickler(self, self._parcel.names).load()
        else:
            from torch._subclasses.fake_tensor import FakeTensorMode

            mode: Any = FakeTensorMode(allow_fallback_kernels=False)
            here = [replace(one, device="cpu") for one in self._parcel.storages]
            with making(Making(here, self._parcel.graphs, mode)):
                _Unpickler(self, self._parcel.names).load()
        self.names.clear()
        gc.collect()

    @property
    def names(self) -> dict[str, Any]:
        """The namespace."""
        return self._module.__dict__

    def find(self, name: str) -> Any:
        """Return what stands in the place of what was not sent."""
        from oomdoctor.forecast.fresh_parcel import NAMESPACE, SHELL

        return {NAMESPACE: self.names, SHELL: self._shell}[name]

    def arrive(self, start: Any, tracker: Tracker, pace: Pace) -> None:
        """Make the namespace on the fakes of a shadow, and count what is alive in it.

        Raises:
            ForecastError: it cannot be made.
        """
        one = Making(self._parcel.storages, self._parcel.graphs, tracker.fake_mode)
        try:
            with making(one):
                made = _Unpickler(self, self._parcel.names).load()
        except ForecastError:
            raise
        except Exception as error:
            raise ForecastError(f"the program could not be made again: {one_sentence(error)}") from error
        self.names.update(made)
        del made
        self._count(one, tracker)
        self._follow(start, tracker, pace)
        _refuse_values(tracker)
        self._go_on_alike()

    def _count(self, one: Making, tracker: Tracker) -> None:
        for number, storage in enumerate(one.storages):
            device = self._parcel.storages[number].device
            ledger = tracker.ledgers.get(device.partition(":")[0])
            if ledger is None:
                raise ForecastError(f"a tensor lives on {device}, which is not forecast in a fresh process")
            ledger.hold(storage)
        for number, role in self._parcel.roles:
            device = self._parcel.storages[number].device
            tracker.ledgers[device.partition(":")[0]].mark(one.storages[number], role)
        storage = None
        _kept.extend(one.release(self._parcel.pinned))
        held = self._parcel.card.held if self._parcel.card is not None else None
        if held is not None:
            _count_hidden(tracker, held)

    def _follow(self, start: Any, tracker: Tracker, pace: Pace) -> None:
        """Have all that was made followed as what is there at the start of a cell is."""
        from oomdoctor.forecast.bounded import Bounded
        from oomdoctor.forecast.loops import follow_functions, follow_loops
        from oomdoctor.forecast.survey import alive

        found = alive()
        pace.optimizers = len(found.optimizers)
        start.modules = [ref(module) for module in found.modules]
        pace.bounded = Bounded(tracker, [ref(one) for one in found.deques if one.maxlen is not None])
        follow_functions(found.functions, self.names)
        follow_loops(pace, tracker.ledger)

    def _go_on_alike(self) -> None:
        """Have gradients on or off as in the other process, and what is drawn at random be what that would draw."""
        of_python, of_numpy, of_torch = self._parcel.surroundings.random
        random.setstate(of_python)
        if of_numpy is not None:
            import numpy as np

            np.random.set_state(of_numpy)
        if of_torch is not None:
            import torch

            torch.set_rng_state(torch.tensor(list(of_torch), dtype=torch.uint8))
        if self._parcel.surroundings.torch is not None:
            import torch

            torch.set_grad_enabled(self._parcel.surroundings.torch[2])


class _Unpickler(pickle.Unpickler):
    def __init__(self, program: Program, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._program = program

    def persistent_load(self, name: Any) -> Any:
        return self._program.find(name)


class _Shadows(Shadows):
    """Shadows of a program that arrives in each of them."""

    def __init__(self, *args: Any, program: Program, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._program = program

    def _bring_back(self) -> None:
        super()._bring_back()
        start = self._start
        if not isinstance(start, Reading):
            start.arrive = lambda tracker, pace: self._program.arrive(start, tracker, pace)

    def next(self) -> tuple[Hashable, Reading] | None:
        """Return the next answer, and that it comes from here."""
        found = super().next()
        return None if found is None else (found[0], replace(found[1], is_fresh=True))


def _told_alone(card: Card | None) -> Card | None:
    """Return the device of the other process as one that holds nothing here, and whose engine is not to be mended."""
    return card if card is None or card.held is None else replace(card, held=0, flag=None, segments=())


def _count_hidden(tracker: Any, held: int) -> None:
    """Count what the other process holds on its device and no tensor shows: workspaces of libraries."""
    import torch

    untyped: Any = torch.UntypedStorage
    hidden = held - tracker.ledgers[tracker.card.type].live
    if hidden > 0:
        _kept.append(untyped(hidden, device="meta"))
        tracker.hold_as("held by libraries", _kept[-1])
        tracker.workspaces.found(hidden)


def _refuse_values(tracker: Any) -> None:
    """Have the shadow end where it reads values that stayed in the other process: no others would be right."""
    known = tracker.values_of

    def values_of(tensor: Any) -> Any:
        if getattr(tensor, UNSENT, False):
            size = format_size(tensor.untyped_storage().nbytes())
            raise ForecastError(f"the cell reads the values of a tensor of {size}, which a fresh process is not sent")
        return known(tensor)

    tracker.values_of = values_of
