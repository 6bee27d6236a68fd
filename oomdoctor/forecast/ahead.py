"""What a cell that was not run will have made by the time that its memory runs out: models, optimizers, loaders.

Changes are made to what is there, and a cell that makes all of it itself has nothing yet. So the cell is run on fake
tensors in a forked process and fails there where its peak is. Then the fakes become tensors with memory of their own,
which nobody touches and which so takes none. Whoever collects evidence finds what a failure would have left.

Limits: autograd's record is lost. A cell that is cut before it reaches its peak again is looked at where it ended.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from oomdoctor.forecast.nursery import Nursery, unsupported
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.session import Attempt, Session
from oomdoctor.model.sizes import MIB
from oomdoctor.objects.alive import alive

if TYPE_CHECKING:
    from oomdoctor.forecast.nursery import Shadows
    from oomdoctor.sandbox.card import Card

_ENDLESS: Final = 1 << 60
"""Bytes that no program fills: whether the cell fits is not asked here."""


Collect = Callable[[Session, BaseException | None, Mapping[str, int]], Evidence]
"""Collects the evidence of a session and its failure, with the numbers of cells by the file names of their code."""


class _Full(MemoryError):
    """The cell is at its peak."""


def evidence_ahead(
    session: Session, collect: Collect, *, level: int, card: Card | None, timeout_s: float
) -> Evidence | None:
    """Return what is found when the last cell of ``session`` is at its peak, None where that cannot be seen.

    Args:
        collect: called in a forked process.
        level: bytes of tensors at the peak.
        card: the device that the cell asks for and that this machine lacks, None where it asks for none.
        timeout_s: time for all of it.
    """
    if timeout_s <= 0 or unsupported() is not None:
        return None

    def work(shadows: Shadows) -> Iterator[Evidence]:
        yield _followed(session, collect, level, shadows.card, timeout_s)

    nursery = Nursery(session, _nothing, work, budget=None, timeout_s=timeout_s, workers=1, card=card)
    found = [one for one in nursery.wait() if isinstance(one, Evidence)]
    return found[0] if found else None


def _nothing() -> None:
    """Bring back the start of the cell, which has not begun."""


def _followed(session: Session, collect: Collect, level: int, card: Card | None, timeout_s: float) -> Evidence:
    from torch.utils._python_dispatch import _disable_current_modes

    from oomdoctor.allocator.device import VirtualAccelerator
    from oomdoctor.errors import ForecastError
    from oomdoctor.forecast import child
    from oomdoctor.forecast.ledger import CELL

    child.warm_up()
    failure = _Full("the cell is at its peak")
    _fail_at(level, failure)
    cached = session.accelerator.read().simulated
    start = child.bring_back(_nothing, session.namespace, card)
    attempt = Attempt(source=session.cells.failing.source)
    reading = child.run(session, attempt, start, budget=None, cached=cached, card=card, time_s=timeout_s)
    exc = failure if failure.__traceback__ is not None else None
    if reading.forecast.refused is not None and exc is None:
        raise ForecastError(reading.forecast.refused)
    with _disable_current_modes():
        made = _made_real()
        if cached or card is not None:
            device = VirtualAccelerator(_ENDLESS)
            if card is None:
                device.adopt()
            else:
                device.count([tensor for tensor, kind in made if kind == card.type])
            session = replace(session, accelerator=device)
        return collect(session, exc, {CELL: session.cells.failing.number})


def _fail_at(level: int, failure: _Full) -> None:
    """Raise ``failure`` from now on, and for the rest of this process, in a cell that comes to hold so many bytes."""
    from oomdoctor.forecast.ledger import Ledger

    hold = Ledger.hold

    def hold_or_fail(self: Ledger, storage: Any) -> None:
        hold(self, storage)
        if self.begun is not None and self.live >= level and failure.__traceback__ is None:
            raise failure

    Ledger.hold = hold_or_fail  # type: ignore[method-assign]


def _made_real() -> list[tuple[Any, str]]:
    """Give every fake tensor memory of its size, and the class of what it stands for.

    What refers to one sees the change, and so do those that share its memory.

    Returns:
        Each with the type of the device that it stood for a tensor on.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    fakes: list[Any] = alive(FakeTensor)
    fakes = [one for one in fakes if one.layout is torch.strided]
    kinds = [fake.fake_device.type for fake in fakes]
    storages: dict[int, Any] = {}
    real = {id(fake): _standing_for(fake, storages) for fake in fakes}
    for fake in fakes:
        gradient = fake.grad if fake.is_leaf else None
        if id(gradient) in real:
            real[id(fake)].grad = real[id(gradient)]
    for fake in fakes:
        tensor = real[id(fake)]
        torch._C._swap_tensor_impl(fake, tensor)
        fake.__class__, tensor.__class__ = type(tensor), type(fake)
    return list(zip(fakes, kinds, strict=True))


def _standing_for(fake: Any, storages: dict[int, Any]) -> Any:
    """Return a tensor of the host that is what a fake one only says to be."""
    import torch

    told = torch._C.TensorBase.untyped_storage(fake)
    if told._cdata not in storages:
        storages[told._cdata] = _untouched(told.nbytes())
    shape = (fake.storage_offset(), fake.size(), fake.stride())
    tensor = torch.empty(0, dtype=fake.dtype).set_(storages[told._cdata], *shape)
    if isinstance(fake, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=fake.requires_grad)
    return tensor


def _untouched(nbytes: int) -> Any:
    """Return a storage that may be larger than the machine's memory: what is only read needs no room of its own."""
    import torch

    if nbytes < MIB:
        return torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
