"""What a first step loads is loaded once here, and not in each copy of the process."""

from __future__ import annotations

from oomdoctor.trial.compare import warm_up

warm_up()
