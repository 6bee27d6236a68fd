"""A model that takes its loss itself has its output layer and loss in chunks of rows, with the same gradients."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import live
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (as the cells under test have it)
from capabilities import TELLS_SHAPES, tells_shapes
from observed import facts
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomdoctor import chunked_head, chunked_loss
from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import get
from oomdoctor.model.fix import Dose, Patch
from oomdoctor.model.unavailable import Refused

WORDS, WIDTH = 500, 16
FIX = get("chunked_loss")


class Words(nn.Module):
    """A language model of the least kind that takes its loss itself, as ``head`` says."""

    def __init__(self, head: Callable[..., torch.Tensor] | None = None, drop: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        # As wide as a head is, with dropout behind it.
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(drop), nn.Linear(4 * WIDTH, WIDTH))
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.embed.weight
        self.loss_of = head or of_rows

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.embed(x)
        logits = self.lm_head(hidden + self.mlp(hidden))
        return logits, self.loss_of(self, hidden, logits, y)


def of_rows(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=0)


def shifted(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    ahead = logits[..., :-1, :].contiguous().float()
    return nn.CrossEntropyLoss(label_smoothing=0.1)(ahead.view(-1, WORDS), y[..., 1:].contiguous().view(-1))


def softcapped(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((torch.tanh(logits / 5) * 5).flatten(0, 1), y.flatten(), reduction="sum") / y.numel()


def transposed(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), y)


def of_some(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[y % 3 == 0], y[y % 3 == 0], weight=torch.linspace(0.5, 1.5, WORDS))


def tied(model: Any, hidden: torch.Tensor, _logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ model.embed.weight.T).view(-1, WORDS), y.view(-1))


def drops(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.dropout(logits, 0.5).view(-1, WORDS), y.view(-1))


def centred(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((logits - logits.mean(dim=(0, 1))).view(-1, WORDS), y.view(-1))


def written(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits[..., 7] = -100.0
    return F.cross_entropy(logits.view(-1, WORDS), y.view(-1).clamp(8))


def batch(rows: int = 6, length: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, WORDS, (rows, length), generator=generator) for _ in range(2))
    y[0, 3:] = 0
    return x, y


def trained(model: nn.Module, *given: torch.Tensor) -> tuple[Any, ...]:
    """Return logits, loss, gradients and random numbers of a step."""
    torch.manual_seed(2)
    logits, loss = model(*given)
    loss.backward()
    return (
        logits.detach(),
        loss.detach(),
        [one.grad for one in model.parameters() if one.grad is not None],
        torch.get_rng_state(),
    )


def classes_of_graph(loss: torch.Tensor) -> set[str]:
    found, todo = set(), [loss.grad_fn]
    while todo:
        if (node := todo.pop()) is not None:
            found.add(node.name())
            todo += [before for before, _ in node.next_functions]
    return found


@pytest.mark.parametrize("chunks", [2, 5, 16])
@pytest.mark.parametrize("head", [of_rows, shifted, transposed, of_some, tied])
def test_a_step_is_the_same_up_to_rounding(head, chunks) -> None:
    plain = Words(head)
    headed = copy.deepcopy(plain)
    chunked_head(headed, chunks)
    logits, loss, gradients, state = trained(plain, *batch())
    again, loss_again, gradients_again, state_again = trained(headed, *batch())
    assert torch.equal(logits, again)
    assert torch.equal(state, state_again)
    assert loss_again.item() == pytest.approx(loss.item(), rel=1e-6)
    for one, other in zip(gradients, gradients_again, strict=True):
        assert (one - other).abs().max() <= 1e-5 * one.abs().max()
    assert ("_OfLayerBackward" in classes_of_graph(headed(*batch())[1])) is TELLS_SHAPES


def test_a_head_that_learns_nothing_is_taken_along() -> None:
    plain = Words()
    plain.embed.requires_grad_(False)
    headed = copy.deepcopy(plain)
    chunked_head(headed, 3)
    (_, loss, gradients, _), (_, again, gradients_again, _) = trained(plain, *batch()), trained(headed, *batch())
    assert again.item() == pytest.approx(loss.item(), rel=1e-6)
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(gradients, gradients_again, strict=True))
    assert ("_OfLayerBackward" in classes_of_graph(headed(*batch())[1])) is TELLS_SHAPES


def clamped(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.relu(logits).view(-1, WORDS), y.view(-1))


def over_classes(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2).softmax(1) * 9, y)


def summed(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.cumsum(1).view(-1, WORDS), y.view(-1))


def cut_out(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.detach().view(-1, WORDS), y.view(-1)) + logits.square().mean()


def without_graph(model: Any, hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        other = model.lm_head(hidden)
    return F.cross_entropy(other.view(-1, WORDS), y.view(-1)) + logits.square().mean()


def hooked(_model: Any, _hidden: torch.Tensor, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits.register_hook(lambda gradient: gradient * 3)
    return F.cross_entropy(logits.view(-1, WORDS), y.view(-1))


def in_another_graph(model: Any, hidden: torch.Tensor, _logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = checkpoint(lambda given: model.lm_head(given), hidden, use_reentrant=True)
    return F.cross_entropy(logits.view(-1, WORDS), y.view(-1))


LEFT = [
    softcapped,
    centred,
    written,
    drops,
    clamped,
    over_classes,
    summed,
    cut_out,
    without_graph,
    hooked,
    in_another_graph,
]


@pytest.mark.parametrize("head", LEFT)
def test_what_is_no_row_of_the_layer_is_left_to_the_loss(head) -> None:
    plain = Words(head)
    headed = copy.deepcopy(plain)
    chunked_head(headed, 4)
    _, loss, gradients, _ = trained(plain, *batch())
    _, loss_again, gradients_again, _ = trained(headed, *batch())
    assert loss_again.item() == pytest.approx(loss.item(), rel=1e-6)
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(gradients, gradients_again, strict=True))
    assert "_OfLayerBackward" not in classes_of_graph(headed(*batch())[1])


@tells_shapes
def test_a_hook_on_the_logits_is_an_error_and_so_is_a_gradient_of_gradients() -> None:
    model = Words()
    chunked_head(model, 4)
    logits, loss = model(*batch())
    logits.retain_grad()
    with pytest.raises(OomDoctorError, match="a hook asks"):
        loss.backward()
    for in_chunks in (lambda: model(*batch())[1], lambda: chunked_loss(F.cross_entropy, 2)(*rows_of(model))):
        with pytest.raises(OomDoctorError, match="gradient of gradients"):
            torch.autograd.grad(in_chunks(), model.embed.weight, create_graph=True)


def rows_of(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = batch()
    return model(x, y)[0].flatten(0, 1), y.flatten()


def test_nothing_of_a_step_is_held_by_a_loss_that_is_kept() -> None:
    model = Words()
    chunked_head(model, 4)
    kept, hidden = [], []
    model.mlp.register_forward_hook(lambda *of: hidden.append(weakref.ref(of[-1])))
    for _ in range(2):
        loss = model(*batch())[1]
        loss.backward()
        kept.append(loss)
    assert [one() for one in hidden] == [None, None]


def test_a_marked_model_is_evaluated_in_inference_mode() -> None:
    model = Words(drop=0.0)
    plain = model(*batch())[1].item()
    chunked_head(model, 4)
    with torch.inference_mode():
        assert model(*batch())[1].item() == pytest.approx(plain, rel=1e-6)


def test_without_gradients_and_under_autocast() -> None:
    model = Words(drop=0.0)
    with torch.no_grad():
        plain = model(*batch())[1]
        chunked_head(model, 4)
        assert model(*batch())[1].item() == pytest.approx(plain.item(), rel=1e-6)
    cast, headed = Words(drop=0.0), Words(drop=0.0)
    headed.load_state_dict(cast.state_dict())
    chunked_head(headed, 4)
    for one in (cast, headed):
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(*batch())[1]
        loss.backward()
    assert (cast.embed.weight.grad - headed.embed.weight.grad).abs().max() < 0.02 * cast.embed.weight.grad.abs().max()


def test_marked_again_copied_and_pickled() -> None:
    model = Words()
    chunked_head(model, 4)
    chunked_head(model, 8)
    assert model.forward.chunks == 8
    assert model.forward.__wrapped__ == type(model).forward.__get__(model)
    keys = set(Words().state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert set(other.state_dict()) == keys
        assert other.forward.__wrapped__.__self__ is other
    with pytest.raises(OomDoctorError, match="compiled"):
        chunked_head(torch.compile(Words(), backend="eager"), 2)


@tells_shapes
def test_it_has_the_logits_and_little_beside() -> None:
    x, y = batch(16, 64)
    size = x.numel() * WORDS * 4
    peaks = []
    for chunks in (0, 16):
        model = Words(drop=0.0)
        if chunks:
            chunked_head(model, chunks)
        with live.Peak() as seen:
            trained(model, x, y)
        peaks.append(seen.peak)
    assert peaks[0] > 4 * size
    assert peaks[0] - peaks[1] > 2 * size


SETUP = "import torch\nmodel = Words()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
LOOP = """\
for x, y in loader:
    optimizer.zero_grad()
    logits, loss = model(x, y)
    loss.backward()
    optimizer.step()
"""


def patched(*sources: str, **namespace: Any) -> Patch | Refused:
    cells = live.cells_of(*sources)
    modules = [(name, value) for name, value in namespace.items() if isinstance(value, nn.Module)]
    evidence = replace(live.evidence(), code=facts(cells, namespace, modules, loaded=()))
    return FIX.patch(cells, evidence, Dose.of(chunks=4))


def test_the_line_stands_where_the_model_is_made() -> None:
    made = patched(SETUP, LOOP, model=Words())
    assert isinstance(made, Patch), made
    (edit,) = made.edits
    assert "model = Words()\nchunked_head(model, 4)\n" in edit.after
    assert edit.replay.split("\n") == ["from oomdoctor import chunked_head", "", "", "chunked_head(model, 4)", ""]
    outside = LOOP.replace(
        "logits, loss = model(x, y)", "loss = F.cross_entropy(model(x, y)[0].view(-1, 500), y.view(-1))"
    )
    found = patched("import torch.nn.functional as F\n" + SETUP, outside, model=Words())
    assert isinstance(found, Patch)
    assert "chunked_loss(F.cross_entropy, 4)(" in found.edits[0].after
    again = patched(SETUP, edit.replay, LOOP, model=Words())
    assert isinstance(again, Refused)
    assert "already" in again.reason
