"""The settings of the caching allocator that a forecast goes by."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from oomdoctor.allocator.settings import AllocatorSettings
from oomdoctor.errors import ForecastError, UsageError

if TYPE_CHECKING:
    from oomdoctor.model.session import Accelerator


def allocator_settings(accelerator: Accelerator) -> AllocatorSettings:
    """Return those of the simulated device, or those that a real one would have; the budget knows a limit by itself.

    Raises:
        ForecastError: a real device would not start with them either.
    """
    from oomdoctor.allocator import virtual
    from oomdoctor.allocator.device import VirtualAccelerator

    device = accelerator if isinstance(accelerator, VirtualAccelerator) else virtual.active()
    try:
        settings = AllocatorSettings.from_environment() if device is None else device.allocator.settings
    except UsageError as error:
        raise ForecastError(str(error)) from error
    return replace(settings, per_process_memory_fraction=1.0)
