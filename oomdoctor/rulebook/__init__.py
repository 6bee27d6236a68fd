"""The rule base: files of ``rules/``, checked when loaded, matched against what is known of a failure."""

from __future__ import annotations

from oomdoctor.rulebook.loading import everything, load, locate, of_notebook
from oomdoctor.rulebook.matching import RuleBook

__all__ = ["RuleBook", "everything", "load", "locate", "of_notebook"]
