"""Forecasts what a cell needs before it is run, by running it on fake tensors in a forked copy of the process."""

from __future__ import annotations

from oomdoctor.forecast.dry_runs import price

__all__ = ["price"]
