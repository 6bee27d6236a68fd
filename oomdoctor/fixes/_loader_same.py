"""Whether a loader set otherwise gives the same batches, bit for bit, and leaves the random numbers where they were.

Batch ``i`` comes from worker ``i % num_workers``, in order, and each worker has random numbers of its own, seeded from
one number that the loader draws when it is iterated over, whatever its settings. So the batches are the same where
samples do not depend on their worker, and the order is where its sampler draws all at once. Workers that stay between
epochs are the exception: made anew, they cost one draw more, and they have forgotten what they knew.

Source: torch/utils/data/dataloader.py, ``_BaseDataLoaderIter.__init__`` and ``_reset``, ``_try_put_index``.
"""

from __future__ import annotations

from collections.abc import Iterable

from oomdoctor.model.code import LoaderFacts
from oomdoctor.model.fix import Effect

__all__ = ["effect_of", "why_not"]


def why_not(loader: LoaderFacts, *, moves_samples: bool, moves_order: bool = True) -> str | None:
    """Return why the batches may differ, None where it is certain that they do not.

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
