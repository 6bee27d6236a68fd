"""What a cell would need, found out without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oomdoctor.errors import UsageError
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.session import Cells, Session
from oomdoctor.model.sizes import format_size
from oomdoctor.objects.kinds import spelled
from oomdoctor.pipeline.failure import open_session, uncounted
from oomdoctor.pipeline.pricing import budget_of

if TYPE_CHECKING:
    from oomdoctor.model.evidence import Evidence
    from oomdoctor.model.memplan import MemPlan


def foresee(
    namespace: dict[str, Any],
    cells: Cells,
    *,
    device: str | None = None,
    memory: int | None = None,
    shell: Any = None,
    time_s: float = 10.0,
) -> MemPlan:
    """Find out what the last of ``cells`` needs, without running it.

    Args:
        device: the name, or the beginning of it, of the device to plan for: the one in use by default.
        memory: bytes of another card to plan for.
        time_s: for each part of the work: the forecast, the cards, the fixes, the batch.

    Raises:
        UsageError: no device in use is called so.
    """
    from oomdoctor.allocator import virtual
    from oomdoctor.evidence import devices
    from oomdoctor.forecast.foresee import another_card

    simulated = virtual.active()
    in_use = [*([simulated] if simulated is not None else []), *devices.in_use()]
    chosen = next((one for one in in_use if device is None or one.name == device), None)
    chosen = chosen or next((one for one in in_use if device and one.name.startswith(device)), None)
    if chosen is None:
        names = " and ".join(dict.fromkeys(one.name for one in in_use))
        raise UsageError(f"no device {device!r} is in use: there is {names}; --device-memory SIZE plans for another")
    with uncounted():
        if memory is None:
            return _foreseen(open_session(spelled(namespace), cells, chosen, shell), None, time_s)
        with another_card() as card:
            return _foreseen(open_session(spelled(namespace), cells, card, shell), memory, time_s)


def _foreseen(session: Session, memory: int | None, time_s: float) -> MemPlan:
    from oomdoctor import fixes
    from oomdoctor.evidence import devices
    from oomdoctor.evidence.moment import collect
    from oomdoctor.fixes import smaller_batch
    from oomdoctor.forecast.foresee import Batches, foresee
    from oomdoctor.model.memplan import Place
    from oomdoctor.views.words import device_name, known

    def observed(
        session: Session, line: int | None, failure: BaseException | None, filenames: Mapping[str, int]
    ) -> Evidence:
        found = collect(session, failure, filenames, line=line, detectors=fixes.detectors())
        if memory is None:
            return found
        held = known(found.device.reserved) or 0
        return replace(found, devices=(replace(found.device, total=memory, free=memory - held), *found.devices[1:]))

    found = observed(session, None, None, {})
    device = found.device
    if memory is None:
        total = None if isinstance(device.total, Unavailable) else device.total
        here = Place(name=device_name(device), total=total, budget=budget_of(found, 0), source=device.basis)
    else:
        name = f"a device of {format_size(memory)}"
        here = Place(name=name, total=memory, budget=memory, source="as it was asked for")
    return foresee(
        session,
        here,
        lambda on, line, *failed: found if line is None and on is session else observed(on, line, *failed),
        list(fixes.catalogue().values()),
        Batches(now=smaller_batch.batch_size, at=smaller_batch.at_batch),
        host=devices.in_use()[-1],
        time_s=time_s,
    )
