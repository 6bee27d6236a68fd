"""A loss in chunks takes the layer that made its logits along, and gives the gradients of the whole loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from capabilities import TELLS_SHAPES, tells_shapes
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomdoctor import chunked_loss
from oomdoctor.allocator import virtual
from oomdoctor.errors import StateError
from oomdoctor.fixes import _chunked_loss
from oomdoctor.objects.alive import alive_exactly

CLASSES = 300
ROWS = (4, 6)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Is filled with the layers that were taken along."""
    seen: list[Any] = []
    find = _chunked_loss._replay_of

    def found(*given: Any) -> Any:
        replay = find(*given)
        seen.extend([] if replay is None else [replay])
        return replay

    monkeypatch.setattr(_chunked_loss, "_replay_of", found)
    return seen


def network(bias: bool = True) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES, bias=bias))


def gradients(model: Any, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def compared(model: Any, logits_of: Callable[[Any, torch.Tensor], torch.Tensor], **options: Any) -> None:
    x = torch.linspace(-1, 1, 4 * 6 * 8).view(*ROWS, 8)
    found = []
    for loss in (F.cross_entropy, chunked_loss(F.cross_entropy, 5)):
        logits = logits_of(model, x)
        target = (torch.arange(len(logits)) * 7) % CLASSES
        taken = loss(logits, target, **options)
        found.append([taken.detach(), *gradients(model, taken)])
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "logits_of",
    [
        lambda model, x: model(x.view(-1, 8)),
        lambda model, x: model(x).view(-1, CLASSES),
        lambda model, x: model(x).flatten(0, 1).contiguous(),
        lambda model, x: model(x).reshape(24, CLASSES).double(),
        lambda model, x: model(x)[:, :-1].reshape(-1, CLASSES),
        lambda model, x: model(x).transpose(0, 1).reshape(-1, CLASSES),
    ],
)
@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 7, "label_smoothing": 0.1}])
def test_the_layer_is_taken_along(layers: list[Any], logits_of: Any, bias: bool, options: Any) -> None:
    compared(network(bias), logits_of, **options)
    assert len(layers) == TELLS_SHAPES


@pytest.mark.parametrize(
    "logits_of",
    [
        lambda model, x: model(x).view(-1, CLASSES) / 2,
        lambda model, x: model(x).view(-1, CLASSES).tanh(),
        lambda model, x: model(x).view(-1, CLASSES).flip(0),
        lambda model, x: model(x).view(-1, CLASSES).add_(1),
        lambda model, x: model(x).view(-1, CLASSES) + model(x).view(-1, CLASSES),
        lambda model, x: F.dropout(model(x).view(-1, CLASSES), 1.0),
    ],
)
def test_logits_that_something_else_made_are_taken_as_they_are(layers: list[Any], logits_of: Any) -> None:
    compared(network(), logits_of)
    assert not layers


def test_a_layer_that_learns_nothing_is_not_taken_along(layers: list[Any]) -> None:
    model = network()
    model[2].requires_grad_(False)
    compared(model, lambda model, x: model(x).view(-1, CLASSES))
    assert not layers


def test_a_hook_gets_the_gradient_of_the_logits(layers: list[Any]) -> None:
    seen = []

    def logits_of(model: Any, x: torch.Tensor) -> torch.Tensor:
        logits = model(x).view(-1, CLASSES)
        logits.register_hook(lambda grad: seen.append(grad.clone()))
        return logits

    compared(network(), logits_of)
    assert not layers
    torch.testing.assert_close(*seen, rtol=1e-4, atol=1e-8)


@tells_shapes
def test_a_hook_that_comes_later_is_told_of_what_it_misses() -> None:
    logits = network()(torch.ones(6, 8))
    loss = chunked_loss(F.cross_entropy, 2)(logits, torch.arange(6))
    logits.retain_grad()
    with pytest.raises(StateError, match="a hook asks for the gradient of logits"):
        loss.backward()


def offloaded(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(x).view(-1, CLASSES)


@pytest.mark.parametrize(
    "logits_of",
    [
        offloaded,
        lambda model, x: checkpoint(model, x, use_reentrant=False).view(-1, CLASSES),
        lambda model, x: checkpoint(model[1:], model[0](x), use_reentrant=False).view(-1, CLASSES),
        lambda model, x: checkpoint(model[1:], model[0](x), use_reentrant=True).view(-1, CLASSES),
    ],
)
def test_what_is_saved_in_another_way_gives_the_same(logits_of: Any) -> None:
    compared(network(), logits_of)


def test_under_autocast(layers: list[Any]) -> None:
    model, x, y = network(), torch.randn(24, 8), torch.arange(24)
    found = []
    for loss in (F.cross_entropy, chunked_loss(F.cross_entropy, 5)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            taken = loss(model(x), y)
        found.append(gradients(model, taken))
    assert len(layers) == TELLS_SHAPES
    for whole, chunked in zip(*found, strict=True):
        assert (chunked - whole).abs().max() <= 0.02 * whole.abs().max()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, nullcontext])
def test_without_a_graph_the_loss_is_the_same(context: Any) -> None:
    logits = network()(torch.randn(6, 8)).detach()
    with context():
        loss = chunked_loss(F.cross_entropy, 3)(logits, torch.arange(6))
    torch.testing.assert_close(loss, F.cross_entropy(logits, torch.arange(6)))


@tells_shapes
def test_there_is_no_gradient_of_all_logits() -> None:
    rows, classes, peaks = 512, 4000, []
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, classes))
    size = rows * classes * 4
    for loss in (F.cross_entropy, chunked_loss(F.cross_entropy, 16)):
        with virtual.simulate(1 << 30) as device:
            x, y = torch.randn(rows, 16), torch.arange(rows)
            device.reset_peak()
            before = device.read().allocated
            loss(model(x), y).backward()
            peaks.append(device.read().peak_allocated - before)
        model.zero_grad()
    assert peaks[0] > 2.9 * size
    assert peaks[1] < 1.5 * size


def test_no_logits_live_on() -> None:
    model = network()
    for _ in range(3):
        chunked_loss(F.cross_entropy, 3)(model(torch.randn(6, 8)), torch.arange(6)).backward()
    assert not [one for one in alive_exactly(torch.Tensor) if one.shape == (6, CLASSES)]
