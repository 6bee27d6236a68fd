"""What it takes to fetch a batch, beside the batch: its samples, and what is made on the way to them.

The shadow fetches a batch once, for real and outside of its modes, and hands out copies of it. In the run that is
forecast each batch is fetched anew, and all of its samples are alive until it is put together. So what a fetch
allocates and frees is taken down in its order, and gone through in the ledger for every batch that is handed out.

Limits: what libraries beside torch allocate, and samples that are fakes. What a data set makes once and keeps is
counted from the first fetch on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from oomdoctor.allocator.blocks import Block
from oomdoctor.allocator.caching import CachingAllocator
from oomdoctor.allocator.composites import run_apart, stays_whole
from oomdoctor.allocator.ledger import Ledger as Counted
from oomdoctor.allocator.ledger import storages_of
from oomdoctor.model.memory import Role

if TYPE_CHECKING:
    from oomdoctor.forecast.tracker import Tracker

_MOST_STEPS: Final = 4096
"""Steps of one fetch; of one that has more, only what is alive together with the batch is gone through."""


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch."""
    for leaf in tree_iter(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf


class Fetch:
    """What one fetch allocates and frees.

    Args:
        steps: ``(number, nbytes)`` for an allocation, ``(number, None)`` for a free.
        made: which tensor of the batch it is that an allocation is for.
    """

    def __init__(self, steps: Sequence[tuple[int, int | None]] = (), made: dict[int, int] | None = None) -> None:
        self._made = made or {}
        begun = {number for number, nbytes in steps if nbytes is not None}
        whole = begun & ({number for number, nbytes in steps if nbytes is None} | self._made.keys())
        self._steps = [step for step in steps if step[0] in whole]
        if len(self._steps) > _MOST_STEPS:
            self._steps = self._with_batch()

    def _with_batch(self) -> list[tuple[int, int | None]]:
        """Return the steps without what is gone before the first tensor of the batch is made."""
        first = next((at for at, step in enumerate(self._steps) if step[0] in self._made), len(self._steps))
        early = {number for number, nbytes in self._steps[:first] if nbytes is None}
        return [step for step in self._steps if step[0] not in early]

    def happens(self, tracker: Tracker, batch: Any = ()) -> None:
        """Go through it in the ledger of the host, and count ``batch`` as what it makes."""
        ledger, tensors, taken = tracker.host, list(tensors_of(batch)), dict[int, Any]()
        for number, nbytes in self._steps:
            if number in self._made:
                tracker.hold_real(tensors[self._made[number]], Role.BATCH)
            elif nbytes is None:
                ledger.give_back(taken.pop(number))
            else:
                taken[number] = ledger.take(nbytes, Role.BATCH)
        for tensor in tensors:
            tracker.hold_real(tensor, Role.BATCH)


class Fetching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes down what is allocated and freed while it is on. To be used where no other mode is on.

    Args:
        tracker: its ledger of the host knows what was there before.
        is_here: whether what is fetched counts here; else nothing is taken down.
    """

    def __init__(self, tracker: Tracker, *, is_here: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker, self._is_here, self._allocator = tracker, is_here, _Noting()
        self._counted = Counted(self._allocator)
        self._begun = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled in a shadow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_here:
            return func(*args, **(kwargs or {}))
        if stays_whole(func):
            return run_apart(func, self, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        for storage in storages_of(result):
            if self._tracker.host.number_of(storage) is None:
                self._counted.count(storage)
        return result

    def begin(self) -> None:
        """Note that what comes is the fetch itself: before it, a sampler may have drawn the order of all samples."""
        self._counted.settle()
        self._begun = len(self._allocator.steps)

    def done(self, batch: Any) -> tuple[Fetch, Fetch]:
        """Return what came before the fetch, and the fetch, whose outcome is ``batch``; count what else is kept."""
        self._counted.settle()
        tensors = {
            tensor.untyped_storage()._cdata: at
            for at, tensor in enumerate(tensors_of(batch))
            if tensor.layout is torch.strided
        }
        made: dict[int, int] = {}
        for storage, block in self._counted.counted():
            at = tensors.get(storage._cdata)
            if at is None:
                self._tracker.host.hold(storage)
            else:
                made[self._allocator.numbers[block]] = at
        self._counted.close()
        steps = self._allocator.steps
        return Fetch(steps[: self._begun]), Fetch(steps[self._begun :], made)


class _Noting(CachingAllocator):
    """An allocator that takes down what is asked of it.

    Attributes:
        steps: see ``Fetch``.
        numbers: of the blocks in use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[int, int | None]] = []
        self.numbers: dict[Block, int] = {}

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        block = super().malloc(nbytes, stream)
        if block is not None:
            self.numbers[block] = len(self.steps)
            self.steps.append((len(self.steps), nbytes))
        return block

    def free(self, block: Block | None) -> None:
        if block is not None:
            self.steps.append((self.numbers.pop(block), None))
        super().free(block)
