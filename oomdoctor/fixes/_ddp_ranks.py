"""What the fixes for several processes share: how many there are, and that no process changes anything on its own.

Processes that train together exchange gradients in lockstep. One that runs a cell again by itself would wait for the
others, or they for it, without end. So these fixes refuse a retry in a single process of several.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes._unfit import Unfit
from oomdoctor.model.code import ReplicaFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose
from oomdoctor.model.session import Session

DDP: Final = "DistributedDataParallel"


def wrapped(evidence: Evidence) -> tuple[ReplicaFacts, ...]:
    """Return the models that DDP wraps, none where it is made in a function; Unfit where DDP is not in use."""
    code = evidence.code
    if code.distributed is None:
        raise Unfit(f"no model is wrapped in {DDP}")
    if code.distributed != DDP:
        raise Unfit(f"{code.distributed} spreads the training, which has settings of its own")
    return tuple(one for one in code.replicas if one.type_name == DDP)


def shared_by(evidence: Evidence) -> int:
    """Return how many processes could each keep a share of what DDP repeats in all of them."""
    found = wrapped(evidence)
    ranks = evidence.code.world_size
    if ranks is None:
        raise Unfit("this process is in no process group, so nothing is known of others to share with")
    if ranks == 1:
        raise Unfit("the process group has one process, so there is none to share with")
    if any(one.ranks not in (None, ranks) for one in found):
        raise Unfit("the model is trained by a part of the processes only, so whom to share with is not known")
    return ranks


@contextmanager
def alone(session: Session, dose: Dose) -> Iterator[None]:
    """Refuse to go on where other processes take part in the training.

    Raises:
        OomDoctorError: they do.
    """
    del session, dose
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
        if ranks > 1:
            raise OomDoctorError(
                f"the training is shared by {ranks} processes, of which one cannot run the cell again on its own"
            )
    yield


def never_applied(session: Session, dose: Dose) -> AbstractContextManager[None]:
    """Refuse to run what is only advice.

    Raises:
        OomDoctorError: always.
    """
    del session, dose
    raise OomDoctorError("this is advice, which is shown and never applied: start the changed program yourself")
