"""Helpers for tests of one's own rules, fixes and programs: fail where it is wanted, heal without a shell."""

from __future__ import annotations

from oomdoctor.testing.healing import assert_heals, oom_at
from oomdoctor.testing.nvml import FakeGpu, FakeProcess, fake_nvml, recorded_nvml

__all__ = ["FakeGpu", "FakeProcess", "assert_heals", "fake_nvml", "oom_at", "recorded_nvml"]
