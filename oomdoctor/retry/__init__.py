"""The retry as a transaction: release what the failure pins, restore, apply, run, commit or restore again."""

from __future__ import annotations

from oomdoctor.retry.heal import Choice, heal
from oomdoctor.retry.release import release
from oomdoctor.retry.transaction import Transaction

__all__ = ["Choice", "Transaction", "heal", "release"]
