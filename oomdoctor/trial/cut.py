"""A cell cut to a step or two on a few rows, in a process that was forked to be thrown away.

A loop of the unchanged program ends after so many optimizer steps, or one batch more where it takes none, but runs a
model on what a loader gives; a loop that only the changed program has, over parts of a batch, is not cut.
Both are told apart by the text of the line that the loop begins with. A ``DataLoader`` gives a few rows of each batch,
fetched in this process, and unlike each other: a wrong weight of a part's loss shows on the row with the most and the
one with the fewest entries that are padding or ignored, and on labels of several kinds.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any, Final
from weakref import WeakSet

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from oomdoctor.objects.leaves import Leaf, tensor_leaf
from oomdoctor.objects.rows import batch_size, cut, tensors_in
from oomdoctor.program.compiled import LoopHooks, install_hooks
from oomdoctor.sandbox.restrictions import fetch_here

_TIMES: Final = 4
"""Times as many optimizer steps as a loop may take end the run: the loop of a library's trainer does not ask."""
_MOST_TURNS: Final = 32
"""Turns of a loop with backward passes after which it ends though no optimizer has stepped."""
_MOST_PARTS: Final = 1_024
"""Turns of a loop that runs a model on other than a loader's batches."""


_LEAST_ROWS: Final = 2


class Enough(BaseException):
    """The program has made as many steps as are looked at."""


class Progress:
    """What the run has come to: optimizer steps, backward passes and calls of modules.

    Attributes:
        known: the lines of the unchanged program: its loops begin on them.
        most: optimizer steps after which a loop ends.
        was_cut: whether a loop ended before its time.
        turns: that a loop makes at least, so that a loop around it makes more than one.
        drawn: the sizes of the batches that loaders have given.
        gradients: that optimizers have stepped by: a learning rate of nothing would leave no trace of them.
        begins: called before the first forward; ``calls``: before each, with its module.
    """

    def __init__(self, known: Collection[str], most: int, turns: int = 0) -> None:
        self.known, self.most, self.turns = frozenset(known), most, turns
        self.begins: Callable[[], None] = lambda: None
        self.calls: Callable[[torch.nn.Module], None] = lambda _: None
        self.steps = self.backwards = self.forwards = 0
        self.was_cut = False
        self.drawn: list[int] = []
        self.gradients: dict[str, Leaf] = {}

    def count(self) -> None:
        """Count from now on."""
        register_optimizer_step_pre_hook(self._steps)
        register_optimizer_step_post_hook(self._stepped)
        register_module_forward_pre_hook(self._forwarded)
        backward, owner = torch.autograd.backward, sys.modules["torch.autograd"]

        def counted(*args: Any, **kwargs: Any) -> None:
            self.backwards += 1
            backward(*args, **kwargs)

        owner.backward = counted  # type: ignore[attr-defined]

    def _forwarded(self, module: torch.nn.Module, *_args: Any) -> None:
        if not self.forwards:
            self.begins()
        self.calls(module)
        self.forwards += 1

    def _steps(self, optimizer: Any, *_args: Any) -> None:
        for at, leaf in enumerate(_gradients_of(optimizer)):
            self.gradients[f"step {self.steps + 1}, gradient {at}.grad"] = leaf

    def _stepped(self, *_args: Any) -> None:
        self.steps += 1
        if self.steps >= _TIMES * self.most:
            self.was_cut = True
            raise Enough

    def is_over(self, loop: Loop, *, gives_batches: bool) -> bool:
        """Tell whether a loop has shown enough."""
        if loop.line not in self.known:
            return False
        if self.steps > loop.steps:
            over = self.steps - loop.steps >= self.most and loop.turns >= self.turns
        elif self.backwards > loop.backwards:
            over = loop.turns >= _MOST_TURNS
        else:
            # A loop over anything but a loader's batches may be a part of a step, as one over the steps of time is.
            most = self.most if len(self.drawn) - loop.drawn >= loop.turns else _MOST_PARTS
            over = gives_batches and loop.turns > most and self.forwards > loop.forwards
        self.was_cut = self.was_cut or over
        return over


def _gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[Leaf]:
    """Yield the gradients that an optimizer is about to step by."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield tensor_leaf(parameter.grad, is_gradient=True)


class Loop:
    """One loop that is running, with what had come to pass when it began."""

    __slots__ = ("backwards", "drawn", "forwards", "line", "progress", "steps", "turns")

    def __init__(self, progress: Progress, line: str) -> None:
        self.progress, self.line, self.turns, self.drawn = progress, line, 0, len(progress.drawn)
        self.steps, self.backwards, self.forwards = progress.steps, progress.backwards, progress.forwards


def _items(progress: Progress, iterable: Any, line: str) -> Iterator[Any]:
    loop, items, gives_batches = Loop(progress, line), iter(iterable), False
    while not progress.is_over(loop, gives_batches=gives_batches):
        try:
            item = next(items)
        except StopIteration:
            return
        loop.turns += 1
        gives_batches = gives_batches or _is_batch(item)
        yield item
        del item


def _is_batch(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return item.ndim > 0 and not isinstance(item, torch.nn.Parameter)
    if isinstance(item, dict):
        return any(map(_is_batch, item.values()))
    return isinstance(item, tuple | list) and any(map(_is_batch, item))


def _rounds(progress: Progress, line: str) -> Callable[[], bool]:
    loop = Loop(progress, line)

    def asked() -> bool:
        goes_on = not progress.is_over(loop, gives_batches=False)
        loop.turns += 1
        return goes_on

    return asked


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def cut_loops(progress: Progress, value: Callable[[tuple[Any, ...], Any], Any]) -> None:
    """Let ``progress`` answer the loops of this process, and ``value`` its expressions."""
    install_hooks(
        LoopHooks(
            value=value,
            items=lambda iterable, _outside: _items(progress, iterable, _line(sys._getframe(1))),
            rounds=lambda _outside: _rounds(progress, _line(sys._getframe(1))),
        )
    )


def cut_loaders(most: int) -> list[int]:
    """Have every ``DataLoader`` give at most ``most`` rows of each batch; return a list that the sizes are noted in.

    Of loaders that are read side by side, one of smaller batches gives as many fewer rows: a program that weighs both
    by the share of one of them would be right by chance.
    """
    sizes: list[int] = []
    at_work: WeakSet[_Few] = WeakSet()
    cls: Any = DataLoader

    def iterate(loader: Any) -> Iterator[Any]:
        fetch_here(loader)
        few = _Few(_SingleProcessDataLoaderIter(loader), loader.batch_size or 0, most, sizes, at_work)
        at_work.add(few)
        return few

    cls.__iter__ = iterate
    return sizes


class _Few:
    """An iterator over batches that gives a few rows of each."""

    def __init__(self, batches: Any, size: int, most: int, sizes: list[int], at_work: WeakSet[_Few]) -> None:
        self._batches, self._size, self._most, self._sizes, self._at_work = batches, size, most, sizes, at_work

    def __iter__(self) -> _Few:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._at_work.discard(self)
            raise
        self._sizes.append(batch_size(batch) or 0)
        largest = max((one._size for one in self._at_work), default=0)
        most = self._most * self._size // largest if self._size else self._most
        return few_rows(batch, max(most, min(_LEAST_ROWS, self._most)))


_IGNORED: Final = -100
"""The label that losses pass over. Source: ``ignore_index`` of ``torch.nn.CrossEntropyLoss``."""


def few_rows(batch: Any, most: int) -> Any:
    """Return a batch of at most ``most`` of its rows, the same structure; in their order, as few as they are."""
    size = batch_size(batch)
    if size is None or size <= most:
        return batch
    rows = _unlike([tensor for tensor in tensors_in(batch) if tensor.ndim and tensor.shape[0] == size], size, most)

    def taken(whole: Any) -> Any:
        if isinstance(whole, list):
            return [whole[row] for row in rows]
        return whole[rows] if whole.ndim and whole.shape[0] == size else whole

    return cut(batch, size, taken)


def _unlike(tensors: list[torch.Tensor], size: int, most: int) -> list[int]:
    features = torch.stack([feature for tensor in tensors for feature in _features(tensor, size)], 1)
    spread = features.std(0, unbiased=False)
    features = (features - features.mean(0)) / torch.where(spread > 0, spread, torch.ones_like(spread))
    chosen = [int(features[:, 0].argmax())]
    distance = (features - features[chosen[0]]).square().sum(1)
    while len(chosen) < most:
        distance[chosen] = -1.0
        chosen.append(int(distance.argmax()))
        distance = torch.minimum(distance, (features - features[chosen[-1]]).square().sum(1))
    return sorted(chosen)


def _features(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Yield what tells the rows of a tensor apart: how much is padding or ignored, and what stands there on average."""
    with torch.no_grad():
        flat = tensor.detach().reshape(size, -1)
        if flat.shape[1] and not flat.is_complex():
            if not flat.is_floating_point():
                commonest = flat.flatten().mode().values if flat.dtype is not torch.bool else flat.new_ones(())
                yield 2.0 * (flat == _IGNORED).double().sum(1)
                yield (flat == commonest).double().sum(1)
            else:
                yield (flat == 0).double().sum(1)
            yield flat.double().nan_to_num(0.0, 0.0, 0.0).mean(1)
        else:
            yield torch.zeros(size, dtype=torch.double)
