"""Which loaders' workers were there, what each took, and whether a loader set otherwise gives the same batches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from oomdoctor.model.absence import Refused, Unavailable
from oomdoctor.model.code import LoaderFacts
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Effect
from oomdoctor.model.memory import HostProcess, Role

__all__ = ["batch_bytes", "effect_of", "in_use", "named", "root_of", "uss", "why_not_same", "workers"]

_WORKER: Final = re.compile(r"DataLoader worker(?: \d+)?(?: of (?P<loader>.+?))?(?P<ended> \(ended\))?")
_ROOT: Final = re.compile(r"[^\W\d]\w*")


def in_use(evidence: Evidence) -> tuple[LoaderFacts, ...] | Refused:
    """Return the loaders with workers that the failing cell goes through, or whose workers are there."""
    known = [loader for loader in evidence.code.loaders if loader.num_workers]
    if not known:
        return Refused("no loader that the notebook has a name for has worker processes")
    roots = {root_of(name) for name, _ in workers(evidence) if name} or set(_iterated(evidence))
    found = tuple(loader for loader in known if root_of(loader.path) in roots)
    if found:
        return found
    return tuple(known) if len(known) == 1 else Refused("which of the loaders was in use is not known")


def _iterated(evidence: Evidence) -> Iterable[str]:
    for loop in evidence.code.loops:
        if loop.in_failing_run:
            name = root_of(loop.loader)
            yield root_of(dict(loop.stands_for).get(name, name))


def root_of(path: str) -> str:
    """Return the name that an expression begins with."""
    match = _ROOT.match(path)
    return match[0] if match else path


def workers(evidence: Evidence) -> tuple[tuple[str | None, HostProcess], ...]:
    """Return the worker processes that are there, each with the loader that it is of where that is known."""
    children = evidence.host.children
    if isinstance(children, Unavailable):
        return ()
    found = ((_WORKER.fullmatch(child.label), child) for child in children)
    return tuple((match["loader"], child) for match, child in found if match is not None and not match["ended"])


def uss(evidence: Evidence, loader: LoaderFacts, alone: bool) -> tuple[int, ...]:
    """Return what each of a loader's workers would free if it ended, in bytes.

    Args:
        alone: no other loader is in use, so that workers without a name are of this one.
    """
    mine = [child for name, child in workers(evidence) if name == loader.path or (name is None and alone)]
    return tuple(child.uss for child in mine if isinstance(child.uss, int))


def batch_bytes(evidence: Evidence) -> int:
    """Return the bytes of a batch as the census found it, on the device where it found most of it."""
    return max((census.bytes_of(Role.BATCH) for census in evidence.censuses), default=0)


def named(loaders: Iterable[LoaderFacts]) -> str:
    """Return the loaders as a dose names them."""
    return ", ".join(loader.path for loader in loaders)


def why_not_same(loader: LoaderFacts, *, moves_samples: bool, moves_order: bool = True) -> str | None:
    """Return why the batches may differ, None where it is certain that they do not.

    Batch ``i`` comes from worker ``i % num_workers``, in order, and each worker has random numbers of its own, seeded
    from one number that the loader draws when it is iterated over, whatever its settings. So the batches are the same
    where samples do not depend on their worker, and the order is where its sampler draws all at once. Workers that stay
    between epochs are the exception: made anew, they cost one draw more, and they have forgotten what they knew.

    Source: torch/utils/data/dataloader.py, ``_BaseDataLoaderIter.__init__`` and ``_reset``, ``_try_put_index``.

    Args:
        moves_samples: samples are made by other workers than before.
        moves_order: indices are asked for earlier or later than before.
    """
    if loader.persistent:
        return f"the workers of `{loader.path}` are kept between epochs, and begin anew with other random numbers"
    if loader.unordered:
        return f"`{loader.path}` gives its batches in the order in which they are ready"
    if moves_samples and loader.varies is not None:
        return f"the samples of `{loader.path}` may depend on the worker that makes them: {loader.varies}"
    if moves_order and loader.order is not None:
        return f"the order of `{loader.path}` may depend on how far ahead batches are fetched: {loader.order}"
    return None


def effect_of(reasons: Iterable[str | None]) -> tuple[Effect, str | None]:
    """Return what may be promised, and the caveat for it."""
    found = list(dict.fromkeys(why for why in reasons if why is not None))
    return (Effect.CHANGES_RESULT, "; ".join(found)) if found else (Effect.EXACT, None)
