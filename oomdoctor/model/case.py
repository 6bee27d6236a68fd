"""The whole story of one failure: what it means, how it ended, and its JSON form."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from oomdoctor.model import jsonable

if TYPE_CHECKING:
    from oomdoctor.model.evidence import Evidence
    from oomdoctor.model.incident import Incident
    from oomdoctor.model.plan import Plan


class Cause(StrEnum):
    """Why the memory ran out. The words are those of the labelled message corpus, and ``memory_cap``.

    A cap is what a setting allows this process to take, where the device itself has more.
    """

    BATCH_OR_ACTIVATION = "batch_or_activation"
    SINGLE_HUGE_TENSOR = "single_huge_tensor"
    MODEL_TOO_LARGE = "model_too_large"
    QUADRATIC_ATTENTION = "quadratic_attention"
    FRAGMENTATION = "fragmentation"
    LEAK_OR_PINNED_GRAPH = "leak_or_pinned_graph"
    OPTIMIZER_STATE = "optimizer_state"
    OTHER_PROCESS = "other_process"
    CUDA_CONTEXT = "cuda_context"
    HOST_RAM = "host_ram"
    WORKER_MEMORY = "worker_memory"
    SHM_TOO_SMALL = "shm_too_small"
    MEMORY_CAP = "memory_cap"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule that fired.

    Attributes:
        confidence: the rule author's estimate of how often it is right when it fires, 0 to 1; not measured.
        because: sentences with the user's own numbers.
        fixes: ids of the fixes that the rule suggests, best first.
        page: address of the rule's page, empty where there is none.
    """

    rule: str
    title: str
    cause: Cause
    confidence: float
    because: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    page: str = ""


class OutcomeKind(StrEnum):
    """How it ended."""

    OFFERED = "offered"
    HEALED = "healed"
    REFUSED = "refused"
    ROLLED_BACK = "rolled_back"
    FAILED = "failed"


class State(StrEnum):
    """What the user's program is left with.

    ``clean``: as if the changed cell had run first. ``restored``: as before the cell. ``unverified``: something may
    differ, and the outcome says what.
    """

    CLEAN = "clean"
    RESTORED = "restored"
    UNVERIFIED = "unverified"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksTogether:
    """How the ranks of a job were healed together, as one of them saw it; seconds by the clocks of the ranks.

    Attributes:
        rank: this one; ``world``: how many there are; ``first``: the one that memory ran out on first.
        released_s: from there until this rank was out of what it was doing.
        agreed_s: from then until all had agreed on the last change; None where they have not.
        committed_s: from the end of this rank's run until all ranks had come to the end; None where they have not.
    """

    rank: int
    world: int
    first: int
    released_s: float
    agreed_s: float | None = None
    committed_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a case ended, or that it is still open.

    Attributes:
        fixes: labels of the fixes in place for the last attempt.
        peak: measured high-water mark of the tensors of the healed run in bytes, by the means that ``measure`` names;
            ``peak_reserved``: of what the allocator held, None where none counts it.
        elapsed_s: of all attempts, with what was looked for and tried out between them; ``run_s``: of the healed run.
        why: one sentence; for a refusal, what could not be brought back.
        checked: what the trial of the change has shown: what was compared, or why it could not be tried.
        anyway: whether nothing was tried for that, and ``--anyway`` would try it all the same.
        interrupted: whether the user ended the last attempt.
        ranks: how the ranks of a job went together, None where this process is alone.
    """

    kind: OutcomeKind = OutcomeKind.OFFERED
    fixes: tuple[str, ...] = ()
    attempts: int = 0
    state: State = State.UNVERIFIED
    peak: int | None = None
    peak_reserved: int | None = None
    measure: str = ""
    elapsed_s: float | None = None
    run_s: float | None = None
    why: str = ""
    checked: str = ""
    anyway: bool = False
    interrupted: bool = False
    ranks: RanksTogether | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One failure from its message to its outcome. ``number`` counts the failures of this process."""

    number: int
    incident: Incident
    evidence: Evidence
    findings: tuple[Finding, ...]
    plan: Plan
    outcome: Outcome = Outcome()

    def to_dict(self) -> dict[str, Any]:
        """Return the case in the JSON shape of schema 1: bytes as ints, absent values null with their ``_why``."""
        return jsonable.case(self)
