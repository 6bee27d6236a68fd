"""The configuration: ``c.OomDoctor.auto = "exact"`` in ``ipython_config.py``, or ``%config OomDoctor``."""

from __future__ import annotations

from traitlets import Bool, Enum, Float, Int, List, Unicode
from traitlets.config import Configurable


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
    panel = Bool(True, help="Show buttons below the diagnosis where ipywidgets is installed.").tag(config=True)
    rule_paths = List(Unicode(), help="Folders with rules of your own.").tag(config=True)

    docs_url = Unicode(
        "", help="Where the documentation is read, such as https://example.org/oomdoctor: causes link to their rules."
    ).tag(config=True)

    def room(self) -> int:
        """Return how many bytes of host memory copies of weights may take now."""
        from oomdoctor.evidence import host

        _, free, _ = host.binding_limit(host.read(in_full=False))
        return int(free * self.snapshot_share)
