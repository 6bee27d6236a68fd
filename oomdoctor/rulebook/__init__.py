"""The rule base: files of ``rules/``, checked when loaded, matched against what is known of a failure."""

from __future__ import annotations

from oomdoctor.rulebook.loading import load
from oomdoctor.rulebook.matching import RuleBook
from oomdoctor.rulebook.sources import configured, everything, locate, of_notebook

__all__ = ["RuleBook", "configured", "everything", "load", "locate", "of_notebook"]
