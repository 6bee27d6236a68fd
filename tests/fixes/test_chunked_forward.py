from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import product
from typing import Any

import live
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _batch_split, get
from oomdoctor.fixes._batch_split import in_parts
from oomdoctor.fixes.chunks import TOLERANCE
from oomdoctor.fixes.inference_precision import detect_runs
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.unavailable import Refused
from oomdoctor.objects.known import Objects
from oomdoctor.program import definitions

FIX = get("chunked_forward")

FIX = get("chunked_forward")
patch, propose = FIX.patch, FIX.propose

FOUR = Dose.of(chunks=4)


class Net(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Dropout(drop), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor, *more: Any, **kwargs: Any) -> torch.Tensor:
        return self.layers(x) + sum(one for one in (*more, *kwargs.values()) if isinstance(one, torch.Tensor))


class Returning(Net):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return self.form(self.layers(x))


@pytest.mark.parametrize("chunks", [2, 4, 8, 16])
@pytest.mark.parametrize("rows", [256, 250])
def test_is_equivalent_and_needs_less(chunks, rows) -> None:
    plain = live.train(Net, None, None, shape=(rows, 8))
    fixed = live.train(Net, None, None, shape=(rows, 8), forward=lambda model, x: in_parts(model, chunks)(x))
    assert plain[0] == pytest.approx(fixed[0], rel=TOLERANCE)
    assert live.furthest(plain[1], fixed[1]) < TOLERANCE
    assert plain[2] == fixed[2]
    assert fixed[3] < plain[3]
    assert FIX.effect is Effect.EQUIVALENT
    assert FIX.tolerance == TOLERANCE


def test_a_sabotaged_split_is_not_equivalent(monkeypatch) -> None:
    def weighted(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x) * torch.arange(256.0)[:, None]

    def split(model: Any, x: torch.Tensor) -> torch.Tensor:
        return weighted(in_parts(model, 4), x)

    join, plain = _batch_split.join, live.train(Net, None, None, forward=weighted)
    assert live.furthest(plain[1], live.train(Net, None, None, forward=split)[1]) < TOLERANCE
    monkeypatch.setattr(_batch_split, "join", lambda path, parts, rows: join(path, parts[::-1], rows[::-1]))
    assert live.furthest(plain[1], live.train(Net, None, None, forward=split)[1]) > TOLERANCE


def test_a_loss_that_couples_the_batch_is_kept() -> None:
    def contrast(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return torch.log_softmax(out @ out.T, 0).diagonal()

    plain = live.train(Net, None, None, shape=(64, 8), forward=contrast)
    fixed = live.train(Net, None, None, shape=(64, 8), forward=lambda model, x: contrast(in_parts(model, 4), x))
    assert live.furthest(plain[1], fixed[1]) < 10 * TOLERANCE


@pytest.mark.parametrize(("kind", "rows"), [("dropout", 2), *product(("dropout", "noise"), (7, 8, 9))])
def test_draws_are_those_of_the_whole_batch_in_the_recomputation_too(kind: str, rows: int) -> None:
    torch.manual_seed(0)
    model, x = (Net(drop=0.5) if kind == "dropout" else Drawing()), torch.randn(rows, 8)
    twin, states = copy.deepcopy(model), []
    for one in (model, twin):
        torch.manual_seed(3)
        out = (in_parts(one, 3) if one is model else one)(x)
        late = torch.rand(5)  # drawn between the forward and the backward
        (out.square().sum() * late.sum()).backward()
        states.append((torch.get_rng_state(), late))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_a_model_that_recomputes_what_it_draws_is_refused() -> None:
    class Recomputing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return checkpoint(self.layers, x, use_reentrant=False)

    with pytest.raises(OomDoctorError, match="in a region that the model itself recomputes"):
        in_parts(Recomputing(drop=0.5), 2)(torch.randn(8, 8))
    assert in_parts(Recomputing(), 2)(torch.randn(8, 8)).shape[0] == 8


def test_noise_for_two_rows_is_refused_where_each_is_a_part() -> None:
    with pytest.raises(OomDoctorError, match="for which row"):
        in_parts(Drawing(), 2)(torch.randn(2, 8))
    assert in_parts(Net(), 2)(torch.randn(2, 8)).shape[0] == 2


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] | None = None
    extra: None = None


class Keyed(OrderedDict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "form",
    [
        lambda out: (out, out * 2),
        lambda out: [out, {"a": out, "b": None}],
        lambda out: Keyed(logits=out),
        lambda out: Output(logits=out, hidden=(out, out + 1)),
        lambda out: torch.max(out, 1),  # a named tuple of torch's own
    ],
)
def test_outputs_of_any_form_are_put_together(form) -> None:
    model, x = Returning(form), torch.randn(10, 8)
    plain = model(x)
    split = in_parts(model, 4)(x)
    assert type(split) is type(plain)
    torch.testing.assert_close(unpacked(plain), unpacked(split))


def unpacked(output: Any) -> Any:
    """Return the output as lists and tensors."""
    if is_dataclass(output):
        return unpacked([getattr(output, field.name) for field in fields(output)])
    if isinstance(output, dict):
        return unpacked([*output.values()])
    return [*map(unpacked, output)] if isinstance(output, tuple | list) else output


class Coupled(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layers(x - x.mean(0))


class Drawing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layers(x + torch.randn_like(x) if self.training else x)


class DrawingOwn(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(0)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.layers(x * torch.rand(1, generator=self.generators[0]))


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        self.calls += 1
        return self.layers(x)


def _sequence_first() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 1, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (DrawingOwn(), "changes the random numbers of `DrawingOwn.generators"),
        (Counting(), "changes Counting.calls"),
        (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), "over the whole batch"),
        (Returning(lambda out: out.mean()), "a loss"),
        (Returning(lambda out: {"loss": out.mean(), "logits": out}), "a loss"),
        (Returning(lambda out: out.T.contiguous()), "not made of rows"),
        (Returning(lambda out: object()), "cannot be put together"),
    ],
)
def test_refuses_when_called(model, why) -> None:
    x = torch.randn(8, 3, 8) if isinstance(model, nn.TransformerEncoder) else torch.randn(8, 8)
    before = live.digest(model)
    with pytest.raises(OomDoctorError, match=why):
        in_parts(model, 4)(x)
    assert [e for e in live.digest(model) if e[1] != "calls"] == [e for e in before if e[1] != "calls"]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.randn(16, 5, 8), torch.randn(5, 5)[:, :1]), {}),
        ((torch.randn(16, 5, 8), torch.randn(1, 8)), {}),
        ((torch.randn(16, 5, 8),), {"mask": torch.randn(16, 5, 1), "flag": True, "name": "a"}),
        ((torch.randn(16, 5, 8), torch.tensor(2.0), None), {}),
        ((torch.randn(32, 3, 32, 8),), {}),
    ],
)
def test_shared_and_batched_arguments_are_told_apart(args, kwargs) -> None:
    model = Net()
    split = in_parts(model, 4)(*args, **kwargs)
    torch.testing.assert_close(split, model(*args, **kwargs))


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((torch.randn(16, 8), torch.randn(16, 16)), "cannot be told"),
        ((torch.randn(16, 8), torch.randn(64, 16, 16)), "cannot be told"),
        ((torch.randn(16, 5, 8), torch.randn(2, 16, 8)), "cannot be told"),
        ((torch.randn(16, 8), 16), "size of the batch"),
        ((torch.randn(16, 8), object()), "may or may not"),
        (([torch.randn(16, 8)],), "list"),
        ((3,), "without a tensor"),
    ],
)
def test_ambiguous_arguments_are_refused(args, why) -> None:
    model = Net()
    with pytest.raises(OomDoctorError, match=why):
        in_parts(model, 4)(*args)


def test_a_model_within_a_model_is_split_once_and_one_sample_is_not() -> None:
    inner = Net()

    class Outer(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            rows.append(len(x))
            return in_parts(inner, 2)(self.layers(x))

    outer, rows = Outer(), []
    inner.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    in_parts(outer, 2)(torch.randn(16, 8)).sum().backward()
    assert sorted(rows) == [7] * 4 + [9] * 4  # two parts of both models, and again in the backward pass
    assert in_parts(outer, 2)(torch.randn(1, 8)).shape == (1, 8)


def test_without_gradients_it_is_split_and_nothing_is_recomputed() -> None:
    model, x = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8)), torch.randn(256, 8)
    peaks = []
    for run in (model, in_parts(model, 4)):
        with torch.no_grad(), live.Peak() as seen:
            out = run(x)
        peaks.append(seen.peak)
        assert out.grad_fn is None
    assert peaks[1] < peaks[0] / 2


def test_replicated_and_hooked_models_are_refused() -> None:
    hooked = Net()
    hooked.layers[0].register_forward_pre_hook(lambda *a: None)
    for model, why in ((nn.DataParallel(Net()), "left as it is"), (hooked, "hooks")):
        with pytest.raises(OomDoctorError, match=why):
            in_parts(model, 4)


def test_works_on_tensors_without_values_as_a_forecast_needs_it() -> None:
    with FakeTensorMode():
        model, x = Net(drop=0.2), torch.randn(16, 8)
        out = in_parts(model, 4)(x)
        out.sum().backward()
        assert out.shape[0] == 16
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_proposals() -> None:
    batch = Holding(bytes=1, device="cuda:0", role=Role.BATCH, path="x", shape=(6, 8))
    found = propose(live.INCIDENT, live.evidence(live.model_facts()))
    assert not isinstance(found, Refused)
    assert [one.dose.number("chunks") for one in found] == [2, 4, 8, 16]
    assert [one.saves for one in found] == sorted(one.saves for one in found)
    assert {one.effect for one in found} == {Effect.EQUIVALENT}
    few = propose(live.INCIDENT, live.evidence(live.model_facts(dropout=("layers.3",)), holdings=(batch,)))
    assert not isinstance(few, Refused)
    assert [one.dose.number("chunks") for one in few] == [2, 4]
    assert {one.effect for one in few} == {Effect.EQUIVALENT}
    inference = propose(live.INCIDENT, live.evidence(live.model_facts(training=False), grad_disabled=True))
    assert not isinstance(inference, Refused)
    assert inference[0].slowdown == 1.0


@pytest.mark.parametrize(
    "facts",
    [
        (),
        (live.model_facts(batch_norm=("norm",)),),
        (live.model_facts(sequence_first=("rnn",)),),
        (live.model_facts(parameter_bytes=0),),
        (live.model_facts(hooked=("layers.2",)),),
        (live.model_facts(leaves=("aux",)),),
    ],
)
def test_proposes_nothing_where_it_cannot_hold(facts) -> None:
    assert isinstance(propose(live.INCIDENT, live.evidence(*facts)), Refused)
    one = Holding(bytes=1, device="cuda:0", role=Role.BATCH, path="x", shape=(1, 8))
    assert isinstance(propose(live.INCIDENT, live.evidence(live.model_facts(), holdings=(one,))), Refused)


SETUP = """\
import torch
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
LOOP = """\
%time pass
losses = []
for x, y in loader:   # a comment
    x = x.to("cpu")
    optimizer.zero_grad()
    out = model(x)
    loss = (out - y).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
LOOP_FIXED = """\
%time pass
from oomdoctor import in_parts

losses = []
for x, y in loader:   # a comment
    x = x.to("cpu")
    optimizer.zero_grad()
    out = in_parts(model, 4)(x)
    loss = (out - y).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


def _run(*sources: str) -> tuple[list[float], dict[str, torch.Tensor], int]:
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(256, 8, generator=generator) for _ in range(10)]
    namespace: dict[str, Any] = {"Net": Net, "loader": list(zip(draw[::2], draw[1::2], strict=True))}
    *before, last = (source.replace("%time pass\n", "") for source in sources)
    for source in before:
        exec(source, namespace)
    with live.Peak() as seen:
        exec(last, namespace)
    return namespace["losses"], live.values(namespace["model"]), seen.peak


def patched(*sources: str, kinds: Any = None, dose: Dose = FOUR, **facts: Any) -> Patch | Refused:
    cells = live.cells_of(*sources)
    models = kinds or {"model": Net()}
    objects = Objects(namespace=models, modules=tuple(models.items()), kinds=dict.fromkeys(models, "model"))
    sites = {"chunked_forward": detect_runs(definitions.read(cells), objects)}
    found = live.evidence(live.model_facts(), **facts)
    return patch(cells, replace(found, code=replace(found.code, sites=sites)), dose)


def test_the_patched_source_needs_less_and_gives_the_same() -> None:
    found = patched(SETUP, LOOP)
    assert isinstance(found, Patch)
    (edit,) = found.edits
    assert edit.after == edit.replay == LOOP_FIXED
    plain, fixed = _run(SETUP, LOOP), _run(SETUP, edit.after)
    assert plain[0] == pytest.approx(fixed[0], rel=TOLERANCE)
    assert live.furthest(plain[1], fixed[1]) < TOLERANCE
    assert fixed[2] < plain[2]
    again = patched(SETUP, edit.after)
    assert isinstance(again, Refused)
    assert "already" in again.reason


FUNCTION = """\
import torch

def train(net, loader):
    losses = []
    for batch in loader:
        x, y = batch
        optimizer.zero_grad()
        out = net(x)
        loss = (out - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

model = 1
"""


def test_a_call_in_a_function_of_an_earlier_cell_is_found() -> None:
    calls = "losses = train(model, loader)\n"
    found = patched(FUNCTION, SETUP, calls)
    assert isinstance(found, Patch)
    (edit,) = found.edits
    assert edit.cell == 1
    assert edit.after.startswith("import torch\nfrom oomdoctor import in_parts\n\ndef train(")
    assert "out = in_parts(net, 4)(x)" in edit.replay
    assert "model = 1" not in edit.replay
    assert _run(SETUP, edit.replay, calls)[0] == pytest.approx(_run(FUNCTION, SETUP, calls)[0], rel=TOLERANCE)


def test_a_call_in_a_method_is_followed_by_live_objects() -> None:
    trainer = (
        "class Trainer:\n    def step(self, x, y):\n        out = self.model(x)\n        loss(out, y).backward()\n"
    )
    calls = "trainer = Trainer()\nfor x, y in loader:\n    trainer.step(x, y)\n"
    found = patched(trainer, calls, kinds={"trainer.model": Net()})
    assert isinstance(found, Patch)
    assert "Trainer.step = Changed.step" in found.edits[0].replay


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("out = model(x / 2)", "out = in_parts(model, 4)(x / 2)"),
        ("out, h = model(x, mask=y)", "out, h = in_parts(model, 4)(x, mask=y)"),
        (
            "loss = f(model(x), model(model(y)))",
            "loss = f(in_parts(model, 4)(x), in_parts(model, 4)(in_parts(model, 4)(y)))",
        ),
        ("out = model(**x).logits", "out = in_parts(model, 4)(**x).logits"),
        ("out = other(x)", "no call of a model"),
        ("out = model.generate(x)", "no call of a model"),
    ],
)
def test_every_call_of_a_model_is_rewritten(line, wanted) -> None:
    found = patched(f"import torch\nfor x, y in loader:\n    {line}\n    loss.backward()\n")
    assert wanted in (found.reason if isinstance(found, Refused) else found.edits[0].after)
