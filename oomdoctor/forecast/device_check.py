"""A small program whose numbers are known, run on the emulated device before any number of it is believed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from oomdoctor.errors import ForecastError
from oomdoctor.forecast.ledger import Ledger
from oomdoctor.sandbox.card import cublas_workspace_bytes
from oomdoctor.sandbox.copies import one_sentence

if TYPE_CHECKING:
    from oomdoctor.forecast.devices import DeviceTracker
    from oomdoctor.sandbox.card import Card

_ROWS, _COLUMNS = 64, 128
_FLOATS = _ROWS * _COLUMNS * 4


def check(tracker: DeviceTracker, card: Card) -> None:
    """Run the program on ledgers of its own.

    Raises:
        ForecastError: it failed, or one of its numbers is not what it has to be.
    """
    with _apart(tracker, card):
        _check_moves(tracker, card)
        _check_step(tracker, card)
        if card.type == "cuda":
            _check_kernels(tracker, card)


def check_autocast(tracker: DeviceTracker, card: Card) -> None:
    """Look at the types of what autocast of the device, which is on, makes.

    Raises:
        ForecastError: one of them is not what it has to be.
    """
    with _apart(tracker, card):
        lower = torch.get_autocast_dtype(card.type)
        tensor = torch.ones(_ROWS, _COLUMNS, device=card.type)
        product = tensor @ tensor.mT
        _expect(card, "the dtype of a product under autocast", product.dtype, lower)
        _expect(card, "the dtype of a softmax under autocast", product.softmax(-1).dtype, torch.float32)
        host = torch.ones(2, 2) @ torch.ones(2, 2)
        _expect(card, "the dtype of a product in host memory", host.dtype, torch.float32)


@contextlib.contextmanager
def _apart(tracker: DeviceTracker, card: Card) -> Iterator[None]:
    """Count what the block makes in ledgers of its own, and say what went wrong in it.

    Raises:
        ForecastError: something did.
    """
    aside = tracker.host, tracker.ledger, tracker.ledgers
    workspaces = tracker.workspaces.swap({})
    tracker.host, tracker.ledger = Ledger(), Ledger()
    tracker.ledgers = {"cpu": tracker.host, card.type: tracker.ledger}
    try:
        with _disable_current_modes(), tracker.fake_mode, tracker, torch.random.fork_rng(devices=()):
            yield
    except ForecastError:
        raise
    except Exception as error:
        raise _failed(card, one_sentence(error)) from error
    finally:
        tracker.host, tracker.ledger, tracker.ledgers = aside
        tracker.workspaces.swap(workspaces)


def _failed(card: Card, what: str) -> ForecastError:
    return ForecastError(f"a device of type {card.type} cannot be emulated with this torch: {what}")


def _expect(card: Card, what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise _failed(card, f"{what} is {found} instead of {expected}")


def _check_moves(tracker: DeviceTracker, card: Card) -> None:
    """There and back, and never both at once."""
    host, there = tracker.ledgers["cpu"], tracker.ledger
    tensor = torch.ones(_ROWS, _COLUMNS, device=card.type)
    _expect(card, "a new tensor", (tensor.device, there.live, host.live), (card.device, _FLOATS, 0))
    back = tensor.cpu()
    _expect(card, "a copy in host memory", (back.device.type, there.live, host.live), ("cpu", _FLOATS, _FLOATS))
    _expect(card, "the device of a copy there", back.to(card.type).device, card.device)
    with contextlib.suppress(RuntimeError):
        _expect(card, "the sum of tensors on two devices", tensor + back, None)
    del tensor
    _expect(card, "what is left on the device", there.live, 0)


def _check_step(tracker: DeviceTracker, card: Card) -> None:
    """One step of training: weight, gradient, and the momentum that stays."""
    weight = torch.nn.Parameter(torch.ones(_COLUMNS, _COLUMNS, device=card.type))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    torch.autograd.backward((torch.ones(_ROWS, _COLUMNS, device=card.type) @ weight).sum())
    _expect(card, "the device of a gradient", getattr(weight.grad, "device", None), card.device)
    optimizer.step()
    weight.grad = None
    products = 2 * cublas_workspace_bytes(card.capability) if card.type == "cuda" else 0
    _expect(card, "what a step leaves", tracker.ledger.live, 2 * _COLUMNS * _COLUMNS * 4 + products)


def _check_kernels(tracker: DeviceTracker, card: Card) -> None:
    """What CUDA does in another way: a mask of bytes, no scores."""
    ledger, begin = tracker.ledger, tracker.ledger.live
    tensor = torch.ones(1, 2, _ROWS, 32, device=card.type, requires_grad=True)
    size = tensor.numel()
    dropped = torch.nn.functional.dropout(tensor, 0.5)
    _expect(card, "what dropout keeps", ledger.live - begin, 4 * size + 5 * size)
    del dropped
    ledger.peak = before = ledger.live
    torch.nn.functional.scaled_dot_product_attention(tensor, tensor, tensor)
    writes_scores = ledger.peak - before - 4 * size >= 2 * _ROWS * _ROWS * 4
    _expect(card, "whether attention writes its scores down", writes_scores, False)
