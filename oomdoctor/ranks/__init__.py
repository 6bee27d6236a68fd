"""Ranks that heal together: one tells, all are released, they agree on one change, go back and run again, or none does.

No collective is used for any of it: what the ranks have to say to each other goes over the job's own store.
"""

from __future__ import annotations

from oomdoctor.ranks.circle import Circle, Word, WordKind
from oomdoctor.ranks.groups import Groups
from oomdoctor.ranks.presence import SilentRank
from oomdoctor.ranks.vote import Offer, Vote, decide

__all__ = ["Circle", "Groups", "Offer", "SilentRank", "Vote", "Word", "WordKind", "decide"]
