"""A training in parts is that of whole batches, with every kind of random draw, and ends with the same generators."""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint

from oomdoctor import batch_parts, join_parts
from oomdoctor.errors import StateError, UsageError

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
STEPS: Final = 20
ROWS: Final = 37


class Noisy(nn.Module):
    """Ends in a drawn choice: rows of probabilities, an exponential, a normal with a spread for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(40, 16), nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        hidden = self.body(x)
        kept = torch.bernoulli(hidden.sigmoid().detach())
        chosen = torch.multinomial(hidden.softmax(1).detach(), 3)
        spread = torch.normal(hidden.detach(), hidden.detach().abs())
        late = torch.empty_like(hidden).exponential_(2.0)
        return self.head(hidden * kept + hidden.gather(1, chosen).sum(1, keepdim=True) + 0.1 * spread + 0.1 * late)


class Autoencoder(nn.Module):
    """Draws around a mean, as a variational one does."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (
            nn.Linear(40, 32),
            nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.Linear(64, 5)),
        )

    def forward(self, x: Any) -> Any:
        mean, spread = self.encoder(x).chunk(2, 1)
        return self.decoder(torch.distributions.Normal(mean, spread.exp()).rsample())


class Encoder(nn.Module):
    """A transformer with dropout, and a masked attention that gives its weights out."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(40, 48)
        self.layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.2, batch_first=True)
        self.attention = nn.MultiheadAttention(48, 4, dropout=0.1, batch_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, x: Any) -> Any:
        hidden = self.layer(self.into(x).unsqueeze(1).repeat(1, 6, 1))
        return self.head(self.attention(hidden, hidden, hidden)[0].mean(1))


class Recurrent(nn.Module):
    """Layers with dropout between them, in whose inside time comes before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(10, 24, num_layers=2, dropout=0.3, batch_first=True), nn.Linear(24, 5)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(x.view(len(x), 4, 10))[0].mean(1))


def plain(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y)


def noisy_input(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x + 0.1 * torch.randn(len(x), 40, device=x.device) + 0.1 * torch.rand_like(x)), y)


DRAWS: Final[dict[str, tuple[Callable[[], Any], Callable[..., Any]]]] = {
    "dropout": (lambda: nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Dropout(0.4), nn.Linear(64, 5)), plain),
    "a transformer": (Encoder, plain),
    "an LSTM": (Recurrent, plain),
    "a variational autoencoder": (Autoencoder, plain),
    "noise in the step": (lambda: nn.Linear(40, 5), noisy_input),
    "choices": (Noisy, plain),
    "dropout of channels": (
        lambda: nn.Sequential(
            *(nn.Linear(40, 64), nn.SELU(), nn.AlphaDropout(0.2), nn.Unflatten(1, (16, 2, 2))),
            *(nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(64, 5)),
        ),
        plain,
    ),
}


def trained(kind: str, parts: int, device: str = "cpu", steps: int = STEPS) -> tuple[list[Any], Any]:
    """Return the weights after some steps, and where the generator of the device stands."""
    make, loss_of = DRAWS[kind]
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(steps):
        x, y = torch.randn(ROWS, 40).to(device), torch.randint(0, 5, (ROWS,)).to(device)
        optimizer.zero_grad()
        if parts == 1:
            loss_of(model, x, y).backward()
        else:
            for part_x, part_y in batch_parts(parts, x, y):
                (loss_of(model, part_x, part_y) * (len(part_x) / len(x))).backward()
        optimizer.step()
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    return [parameter.detach().cpu() for parameter in model.parameters()], state


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("kind", DRAWS)
def test_a_training_in_parts_is_that_of_whole_batches(kind: str, parts: int) -> None:
    weights, state = trained(kind, 1)
    found, end = trained(kind, parts)
    for one, other in zip(weights, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert torch.equal(state, end)


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("kind", [kind for kind in DRAWS if kind not in ("a transformer", "an LSTM")])
def test_a_training_in_parts_on_a_device_is_that_of_whole_batches(kind: str) -> None:
    weights, state = trained(kind, 1, "cuda", steps=2)
    found, end = trained(kind, 3, "cuda", steps=2)
    for one, other in zip(weights, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    assert torch.equal(state, end)


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["a transformer", "an LSTM"])
def test_kernels_that_draw_by_themselves_are_refused(kind: str) -> None:
    with pytest.raises(StateError, match="inside of its kernel"):
        trained(kind, 3, "cuda", steps=1)


def test_without_the_draws_of_the_whole_batch_it_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, _ = trained("dropout", 1)
    monkeypatch.setattr(
        "oomdoctor.fixes._batch_draws.Draws._drawn", lambda _self, func, args, kwargs, _given: func(*args, **kwargs)
    )
    found, _ = trained("dropout", 3)
    assert not torch.allclose(weights[0], found[0], atol=1e-3)


@pytest.mark.parametrize("shape", [(33, 50), (1, 512), (1,)])
@pytest.mark.parametrize("parts", [2, 4, 9])
def test_what_has_no_rows_is_drawn_once_for_the_batch(shape: tuple[int, ...], parts: int) -> None:
    torch.manual_seed(1)
    wanted = F.dropout(torch.ones(shape), 0.5)
    torch.manual_seed(1)
    for _ in batch_parts(parts, torch.zeros(ROWS, 3)):
        assert torch.equal(F.dropout(torch.ones(shape), 0.5), wanted)


@pytest.mark.parametrize("rows", range(1, 9))
def test_a_batch_of_few_rows_is_right_or_an_error(rows: int) -> None:
    """A mask for all rows is not taken for one of a part with a single row."""
    torch.manual_seed(1)
    wanted = F.dropout(torch.ones(1, 512), 0.5)
    torch.manual_seed(1)
    with suppress(StateError):
        for _ in batch_parts(4, torch.zeros(rows, 3)):
            found = F.dropout(torch.ones(1, 512), 0.5)
        assert torch.equal(found, wanted)


def test_a_generator_of_the_users_own_is_set_back_as_well() -> None:
    own = torch.Generator().manual_seed(3)
    wanted = torch.rand(ROWS, generator=own)
    end = own.get_state()
    own.manual_seed(3)
    found = [torch.rand(len(part), generator=own) for part in batch_parts(4, torch.zeros(ROWS, 3))]
    assert torch.equal(torch.cat(found), wanted)
    assert torch.equal(own.get_state(), end)


def test_dictionaries_lists_and_what_is_no_tensor_go_to_each_part() -> None:
    batch = {"x": torch.arange(7), "pair": [torch.arange(14).view(7, 2), "text"], "scale": torch.tensor(2.0)}
    parts = list(batch_parts(3, batch))
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), batch["pair"][0])
    assert all(part["pair"][1] == "text" and part["scale"] is batch["scale"] for part in parts)


def test_the_batch_may_be_another_dimension() -> None:
    time_major = torch.randn(5, ROWS, 3)
    torch.manual_seed(1)
    wanted = F.dropout(time_major, 0.5)
    torch.manual_seed(1)
    assert torch.equal(torch.cat([F.dropout(part, 0.5) for part in batch_parts(4, time_major, dim=1)], 1), wanted)


@pytest.mark.parametrize(
    ("draw", "why"),
    [
        (lambda part: torch.rand(len(part), len(part)), "cannot be told"),
        (lambda part: F.dropout(torch.ones(9, 3)), "cannot be told"),
        (lambda part: F.dropout(torch.ones(len(part), 3) if len(part) < 8 else torch.ones(1, 3, 4)), "cannot be told"),
    ],
    ids=["all pairs", "a size by chance", "another draw"],
)
def test_what_cannot_be_told_is_an_error(draw: Callable[[Any], Any], why: str) -> None:
    def drawn() -> None:
        for part in batch_parts(4, torch.zeros(32, 3)):
            draw(part)

    with pytest.raises(StateError, match=why):
        drawn()


def test_without_a_tensor_there_is_no_batch() -> None:
    with pytest.raises(UsageError, match="no tensor"):
        next(iter(batch_parts(2, "text")))
    with pytest.raises(UsageError, match="one row in dimension 1"):
        next(batch_parts(2, torch.zeros(8, 1, 4), dim=1))


def test_a_batch_is_cut_where_each_tensor_has_it_and_joined_again() -> None:
    words, state = torch.randn(4, 6, 3), (torch.randn(2, 6, 5), torch.randn(2, 6, 5))
    flat, scale = torch.arange(24).view(4, 6), torch.randn(3)
    given = batch_parts(3, words, flat.view(-1), state, scale, np.arange(6), dim=1)
    parts = [(w, f.view(4, -1), s, same, rows) for w, f, s, same, rows in given]
    assert [len(rows) for *_, rows in parts] == [3, 2, 1]
    assert all(same is scale for _, _, _, same, _ in parts)
    assert torch.equal(torch.cat([f for _, f, *_ in parts], 1), flat)
    assert torch.equal(join_parts([w for w, *_ in parts]), words)
    assert all(map(torch.equal, join_parts([s for _, _, s, _, _ in parts]), state))


def test_what_has_a_graph_gets_the_gradients_of_all_parts_at_once() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    made = torch.tanh(torch.randn(8, 3) @ weight)
    wanted = torch.autograd.grad(made.square().sum(), weight, retain_graph=True)[0]
    for part in batch_parts(4, made):
        part.square().sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, wanted)


@pytest.mark.parametrize("module", ["random", "numpy.random"])
def test_python_and_numpy_draw_alike_for_each_part_and_end_as_after_the_whole(module: str) -> None:
    """A depth that is drawn by a forward is that of the step, also where a mask of torch's is drawn beside it."""
    source = importlib.import_module(module)
    source.seed(3)
    whole = [source.random() for _ in range(4)]
    source.seed(3)
    seen = [[source.random(), source.random()] for _ in batch_parts(3, torch.zeros(ROWS, 2))]
    assert seen == [whole[:2]] * 3
    assert source.random() == whole[2]


def test_draws_of_python_for_each_row_are_an_error() -> None:
    def drawn() -> list[float]:
        return [random.random() for part in batch_parts(2, torch.zeros(ROWS, 2)) for _ in part]

    with pytest.raises(StateError, match="another number of times"):
        drawn()


def test_items_of_each_sample_with_a_length_of_their_own_go_with_its_rows() -> None:
    prompts = [torch.arange(count) for count in (2, 5, 3, 4, 7)]
    batch = {"prompt": prompts, "x": torch.arange(5)[:, None], "pair": [torch.zeros(5), torch.ones(5)]}
    parts = list(batch_parts(2, batch))
    assert [len(one) for part in parts for one in part["prompt"]] == [2, 5, 3, 4, 7]
    assert all(len(part["prompt"]) == len(part["x"]) == len(part["pair"][1]) for part in parts)


def test_parts_of_another_dimension_lie_as_a_batch_does_and_what_was_flattened_beside_them_is_cut() -> None:
    source, target = torch.zeros(9, 5, 2), torch.arange(35).view(7, 5)
    parts = list(batch_parts(2, source, target, target.flatten(), dim=1))
    assert all(part.is_contiguous() for of in parts for part in of)
    assert all(torch.equal(flat, cut.flatten()) for _, cut, flat in parts)


def test_the_first_part_has_two_rows_at_least() -> None:
    sizes = [
        [len(part) for part in batch_parts(parts, torch.zeros(rows, 2))] for rows, parts in ((4, 4), (8, 4), (9, 4))
    ]
    assert sizes == [[2, 1, 1], [3, 2, 2, 1], [3, 2, 2, 2]]


def test_operators_that_draw_nothing_pass_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    mode: Any = importlib.import_module("oomdoctor.fixes._batch_draws").Draws
    handle = mode.__torch_dispatch__
    monkeypatch.setattr(
        mode, "__torch_dispatch__", lambda self, f, *given: seen.append(str(f)) or handle(self, f, *given)
    )
    layer = nn.Linear(4, 4)
    for part in batch_parts(2, torch.randn(6, 4)):
        layer(part).relu().sum().backward()
    assert not seen
    for part in batch_parts(2, torch.randn(6, 4)):
        F.dropout(layer(part)).sum().backward()
    assert "aten.bernoulli_.float" in seen


def test_without_a_key_of_their_own_all_operators_pass_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = importlib.import_module("oomdoctor.fixes._batch_draws")
    monkeypatch.setattr(module, "_KEY", "NoSuchKey")
    monkeypatch.setattr(module, "_random_key", module._random_key.__wrapped__)
    x = torch.ones(6, 4)
    torch.manual_seed(0)
    whole, state = F.dropout(x), torch.get_rng_state()
    torch.manual_seed(0)
    assert torch.equal(torch.cat([F.dropout(part) for part in batch_parts(2, x)]), whole)
    assert torch.equal(torch.get_rng_state(), state)


def test_compiled_functions_run_as_they_are_written() -> None:
    compiled = []

    def backend(graph: Any, _inputs: Any) -> Any:
        return lambda *given: compiled.append(1) or graph(*given)

    function = torch.compile(lambda x: F.dropout(x) * 2, backend=backend)
    function(torch.ones(3, 3))
    assert compiled == [1]
    for part in batch_parts(2, torch.ones(3, 3)):
        function(part)
    assert compiled == [1]


@pytest.mark.parametrize(("rows", "parts"), [(8, 4), (4, 4), (3, 2), (9, 3), (5, 8)])
def test_how_draws_lie_in_memory_is_that_of_the_whole_batch(rows: int, parts: int) -> None:
    """A layer that turns time and batch about leaves them so in memory, which a part of one row does not show."""
    torch.manual_seed(0)
    model, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True), torch.randn(rows, 5, 8)
    found = []
    for several in (False, True):
        torch.manual_seed(3)
        model.zero_grad()
        for part in batch_parts(parts, x) if several else (x,):
            F.dropout(model(part).transpose(0, 1).relu(), 0.2).square().sum().backward()
        found.append([one.grad for one in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def test_what_a_checkpoint_draws_again_is_that_of_the_part_or_an_error() -> None:
    torch.manual_seed(0)
    layers, x = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.4), nn.Linear(8, 2)), torch.randn(12, 3)
    grads = []
    for parts in (1, 3):
        torch.manual_seed(2)
        layers.zero_grad()
        for part in (x,) if parts == 1 else batch_parts(parts, x):
            checkpoint(layers, part, use_reentrant=False).square().sum().backward()
        grads.append([one.grad for one in layers.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    with pytest.raises(StateError, match="backward comes after"):
        sum(checkpoint(layers, part, use_reentrant=False).sum() for part in batch_parts(3, x)).backward()


@pytest.mark.parametrize(
    ("draw", "why"),
    [
        (lambda part: torch.randperm(len(part)), "by {'n': "),
        (lambda part: torch.randint(len(part), (1, 1)), "by {'high': "),
        (lambda part: torch.rand(int((part > 0).sum())), "draws something else for each part"),
        (lambda part: torch.randn_like(part.unsqueeze(1).expand(-1, 4, -1)), "into memory with gaps"),
        (lambda part: torch.zeros(len(part), 16)[:, :8].normal_(), "into memory with gaps"),
    ],
    ids=["a permutation", "a choice among rows", "a number of the data", "one place for several", "gaps"],
)
def test_draws_that_have_no_rows_are_errors(draw: Callable[[Any], Any], why: str) -> None:
    def drawn() -> None:
        for part in batch_parts(3, torch.arange(16.0).view(8, 2) - 7):
            draw(part)

    with pytest.raises(StateError, match=re.escape(why)):
        drawn()
