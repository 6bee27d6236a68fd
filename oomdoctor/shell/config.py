"""The configuration: ``c.OomDoctor.auto = "exact"`` in ``ipython_config.py``, or ``%config OomDoctor``."""

from __future__ import annotations

from typing import Any

from traitlets import Bool, Enum, Float, Int, List, TraitError, Unicode, observe, validate
from traitlets.config import Configurable

from oomdoctor.errors import SizeError
from oomdoctor.language import LANGUAGES, choose
from oomdoctor.model.sizes import parse_size


class OomDoctor(Configurable):
    """How oomdoctor behaves in this shell."""

    auto = Enum(
        ("off", "exact", "any"),
        default_value="off",
        help="Retry by itself: never, with fixes that keep the result, or with any fix.",
    ).tag(config=True)
    attempts = Int(3, min=1, max=20, help="How many attempts one retry may make.").tag(config=True)
    retry_time_s = Float(3600.0, min=0.0, help="No further attempt is begun after this time, in seconds.").tag(
        config=True
    )
    forecast_time_s = Float(
        10.0, min=0.0, help="Time for all forecasts of one failure, in seconds; 0 prices by estimates alone."
    ).tag(config=True)
    snapshot = Bool(True, help="Save the state at the start of each cell, so that a retry can go back to it.").tag(
        config=True
    )
    snapshot_share = Float(
        0.25, min=0.0, max=1.0, help="Share of the free host memory that copies of weights may take."
    ).tag(config=True)
    keep_frames = Bool(False, help="Keep the frames of a failure for %debug, and the memory that they pin.").tag(
        config=True
    )
    guard = Enum(
        ("auto", "on", "off"),
        default_value="auto",
        help="Raise a MemoryError before host memory runs out: where a limit is set or near, always, or never.",
    ).tag(config=True)
    guard_margin = Unicode(
        help="Host memory that the guard keeps free, such as 256MiB; empty for 1/32 of the limit, 64 to 512 MiB."
    ).tag(config=True)
    panel = Bool(True, help="Show buttons below the diagnosis where ipywidgets is installed.").tag(config=True)
    language = Enum(
        LANGUAGES,
        default_value="auto",
        help="Language of what is shown: English, Chinese, or that of the environment or else of JupyterLab.",
    ).tag(config=True)
    rule_paths = List(Unicode(), help="Folders with rules of your own.").tag(config=True)

    docs_url = Unicode(
        "", help="Where the documentation is read, such as https://example.org/oomdoctor: causes link to their rules."
    ).tag(config=True)

    @observe("language")
    def _choose(self, change: Any) -> None:
        choose(change["new"])

    @validate("guard_margin")
    def _validate_margin(self, proposal: Any) -> str:
        text = str(proposal["value"]).strip()
        try:
            self.margin = parse_size(text) if text else 0
        except SizeError as exc:
            raise TraitError(f"guard_margin: {exc}") from None
        return text

    margin = 0
    """``guard_margin`` in bytes, 0 where it is left to the guard."""

    @property
    def limits(self) -> dict[str, Any]:
        """What bounds a retry: how many attempts, the time after which none is begun, and that of its forecasts."""
        return {"most_attempts": self.attempts, "time_budget_s": self.retry_time_s, "plan_s": self.forecast_time_s}

    def room(self) -> int:
        """Return how many bytes of host memory copies of weights may take now."""
        from oomdoctor.evidence import host

        _, free, _ = host.binding_limit(host.read(in_full=False))
        return int(free * self.snapshot_share)
