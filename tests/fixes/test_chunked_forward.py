from __future__ import annotations

import copy
import functools
import inspect
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import live
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _split
from oomdoctor.fixes.chunked_forward import FIX, TOLERANCE, patch, propose
from oomdoctor.model.absence import Refused
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role

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
    fixed = live.train(Net, FIX, Dose.of(chunks=chunks), shape=(rows, 8))
    assert plain[0] == pytest.approx(fixed[0], rel=TOLERANCE)
    assert live.furthest(plain[1], fixed[1]) < TOLERANCE
    assert plain[2] == fixed[2]
    assert fixed[3] < plain[3]
    assert FIX.effect is Effect.EQUIVALENT
    assert FIX.tolerance == TOLERANCE


def test_a_sabotaged_split_is_not_equivalent(monkeypatch) -> None:
    def weighted(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x) * torch.arange(256.0)[:, None]

    join, plain = _split.join, live.train(Net, None, None, forward=weighted)
    assert live.furthest(plain[1], live.train(Net, FIX, FOUR, forward=weighted)[1]) < TOLERANCE
    monkeypatch.setattr(_split, "join", lambda path, parts, rows: join(path, parts[::-1], rows[::-1]))
    assert live.furthest(plain[1], live.train(Net, FIX, FOUR, forward=weighted)[1]) > TOLERANCE


def test_a_loss_that_couples_the_batch_is_kept() -> None:
    def contrast(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return torch.log_softmax(out @ out.T, 0).diagonal()

    plain, fixed = (live.train(Net, fix, FOUR, shape=(64, 8), forward=contrast) for fix in (None, FIX))
    assert live.furthest(plain[1], fixed[1]) < 10 * TOLERANCE


def test_dropout_changes_results_and_is_replayed_by_the_recomputation() -> None:
    torch.manual_seed(0)
    model, x = Net(drop=0.5), torch.randn(8, 8)
    twin = copy.deepcopy(model)
    with FIX.apply(live.session(model=model), Dose.of(chunks=2)):
        torch.manual_seed(3)
        model(x).square().sum().backward()
    torch.manual_seed(3)
    torch.cat([twin(part) for part in x.chunk(2)]).square().sum().backward()
    assert all(
        torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-6)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


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
    with FIX.apply(live.session(model=model), FOUR):
        split = model(x)
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
        (Drawing(), "draws random numbers"),
        (DrawingOwn(), r"the random numbers of `model.generators\[0\]`"),
        (Counting(), "changes model.calls"),
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
    with FIX.apply(live.session(model=model), FOUR), pytest.raises(OomDoctorError, match=why):
        model(x)
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
    with FIX.apply(live.session(model=model), FOUR):
        split = model(*args, **kwargs)
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
    with FIX.apply(live.session(model=model), FOUR), pytest.raises(OomDoctorError, match=why):
        model(*args)


@pytest.mark.parametrize("raises", [False, True])
def test_undoes_itself_to_the_last_attribute(raises) -> None:
    model = Net(drop=0.1)
    model.layers[3].eval()
    before, marks = live.digest(model), torch.get_rng_state()
    try:
        with FIX.apply(live.session(model=model), FOUR):
            assert live.digest(model) != before
            model(torch.ones(8, 8)).sum()
            if raises:
                raise MemoryError
    except MemoryError:
        pass
    assert live.digest(model) == before
    assert torch.equal(marks, torch.get_rng_state())


def test_a_model_within_a_model_is_split_once_and_one_sample_is_not() -> None:
    inner = Net()

    class Outer(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            rows.append(len(x))
            return inner(self.layers(x))

    outer, rows = Outer(), []
    with FIX.apply(live.session(outer=outer, inner=inner), Dose.of(chunks=2)):
        outer(torch.randn(16, 8)).sum().backward()
        assert rows == [8, 8, 8, 8]  # two parts, and both again in the backward pass; the check leaves no trace
        assert outer(torch.randn(1, 8)).shape == (1, 8)
        twin = copy.deepcopy(outer)
    assert twin(torch.randn(3, 8)).shape == (3, 8)


def test_without_gradients_it_is_split_and_nothing_is_recomputed() -> None:
    model, x = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8)), torch.randn(256, 8)
    peaks = []
    for context in (nullcontext(), FIX.apply(live.session(model=model), FOUR)):
        with context, torch.no_grad(), live.Peak() as seen:
            out = model(x)
        peaks.append(seen.peak)
        assert out.grad_fn is None
    assert peaks[1] < peaks[0] / 2


def test_replicated_and_hooked_models_are_refused_before_anything_changes() -> None:
    hooked = Net()
    hooked.layers[0].register_forward_pre_hook(lambda *a: None)
    for model, why in ((nn.DataParallel(Net()), "left as it is"), (hooked, "hooks"), (nn.ReLU(), "no model")):
        before = live.digest(model)
        with pytest.raises(OomDoctorError, match=why), FIX.apply(live.session(model=model), FOUR):
            pass
        assert live.digest(model) == before


def test_works_on_tensors_without_values_as_a_forecast_needs_it() -> None:
    with FakeTensorMode():
        model, x = Net(drop=0.2), torch.randn(16, 8)
        with FIX.apply(live.session(model=model), FOUR):
            out = model(x)
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
    assert {one.effect for one in few} == {Effect.CHANGES_RESULT}
    assert few[0].caveat is not None
    assert "layers.3" in few[0].caveat
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
from torch.utils.checkpoint import checkpoint

losses = []
for x, y in loader:   # a comment
    x = x.to("cpu")
    optimizer.zero_grad()
    out = torch.cat([checkpoint(model, part, use_reentrant=False) for part in x.chunk(4)])
    loss = (out - y).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


def _run(*sources: str, fixed: bool = False) -> tuple[list[float], dict[str, torch.Tensor], int]:
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(256, 8, generator=generator) for _ in range(10)]
    namespace: dict[str, Any] = {"Net": Net, "loader": list(zip(draw[::2], draw[1::2], strict=True))}
    *before, last = (source.replace("%time pass\n", "") for source in sources)
    for source in before:
        exec(source, namespace)
    context = FIX.apply(live.session(model=namespace["model"]), FOUR) if fixed else nullcontext()
    with context, live.Peak() as seen:
        exec(last, namespace)
    return namespace["losses"], live.values(namespace["model"]), seen.peak


def test_the_patched_source_gives_the_numbers_of_the_live_change() -> None:
    cells, facts = live.cells_of(SETUP, LOOP), live.evidence(live.model_facts(), loops=(live.loop(2, 3),))
    found = patch(cells, facts, FOUR)
    assert isinstance(found, Patch)
    (edit,) = found.edits
    assert edit.after == edit.replay == LOOP_FIXED
    plain, patched, applied = _run(SETUP, LOOP), _run(SETUP, edit.after), _run(SETUP, LOOP, fixed=True)
    assert patched[0] == applied[0]
    assert live.same(patched[1], applied[1])
    assert plain[0] == pytest.approx(patched[0], rel=TOLERANCE)
    assert patched[2] < plain[2]
    assert isinstance(patch(live.cells_of(SETUP, edit.after), facts, FOUR), Refused)


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


def test_a_loop_in_a_function_of_an_earlier_cell_is_replayed_alone() -> None:
    calls = "losses = train(model, loader)\n"
    facts = live.evidence(live.model_facts(), loops=(live.loop(1, 5, "train", batch=("batch",), models=("net",)),))
    found = patch(live.cells_of(FUNCTION, SETUP, calls), facts, FOUR)
    assert isinstance(found, Patch)
    (edit,) = found.edits
    assert edit.cell == 1
    assert edit.after.startswith("import torch\nfrom torch.utils.checkpoint import checkpoint\n\ndef train(")
    assert "model = 1" not in edit.replay
    patched = _run(SETUP, edit.replay, calls)
    replayed = _run(FUNCTION, SETUP, edit.replay, calls)
    applied = _run(FUNCTION, SETUP, calls, fixed=True)
    assert patched[0] == replayed[0] == applied[0]
    assert live.same(patched[1], applied[1])


STEP = """\
import torch

def forward(net, x):
    return net(x)

def step(x, y, *, net):
    optimizer.zero_grad()
    loss = (forward(net, x) - y).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()
"""


@pytest.mark.parametrize("inline", [False, True])
def test_a_call_in_a_function_that_the_step_calls_is_found(inline) -> None:
    step = STEP.replace("forward(net, x)", "net(x)") if inline else STEP
    calls = "losses = []\nfor x, y in loader:\n    losses.append(step(x, y, net=model))\n"
    facts = live.evidence(live.model_facts(), loops=(live.loop(3, 2),))
    found = patch(live.cells_of(step, SETUP, calls), facts, FOUR)
    assert isinstance(found, Patch), found
    (edit,) = found.edits
    assert edit.cell == 1
    assert "torch.cat([checkpoint(net, part, use_reentrant=False) for part in x.chunk(4)])" in edit.replay
    assert ("def step" in edit.replay) == inline
    replayed, applied = _run(step, SETUP, edit.replay, calls), _run(step, SETUP, calls, fixed=True)
    assert replayed[0] == applied[0]
    assert live.same(replayed[1], applied[1])
    again = patch(live.cells_of(edit.after, SETUP, calls), facts, FOUR)
    assert isinstance(again, Refused)
    assert "already" in again.reason


def test_a_call_in_a_method_is_followed_by_live_objects() -> None:
    trainer = (
        "class Trainer:\n    def step(self, x, y):\n        out = self.model(x)\n        loss(out, y).backward()\n"
    )
    calls = "trainer = Trainer()\nfor x, y in loader:\n    trainer.step(x, y)\n"
    facts = live.evidence(live.model_facts("trainer.model"), loops=(live.loop(2, 2, models=("trainer.model",)),))
    found = patch(live.cells_of(trainer, calls), facts, FOUR)
    assert isinstance(found, Patch)
    assert "Trainer.step = Changed.step" in found.edits[0].replay


def _rewritten(line: str, before: str = "", after: str = "", **facts: Any) -> str | Refused:
    source = f"import torch\nfor x, y in loader:\n{before}    {line}\n{after}    loss.backward()\n"
    found = patch(live.cells_of(source), live.evidence(live.model_facts(), loops=(live.loop(1, 2),), **facts), FOUR)
    if isinstance(found, Refused):
        return found
    compile(found.edits[0].after, "cell", "exec")
    return next(text for text in found.edits[0].after.splitlines() if "part" in text).strip()


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (
            "out = model(x / 2)",
            "out = torch.cat([checkpoint(model, part, use_reentrant=False) for part in (x / 2).chunk(4)])",
        ),
        (
            "out = model(x.to(d), y[:, :-1])",
            (
                "out = torch.cat([checkpoint(model, *part, use_reentrant=False) "
                "for part in zip(x.to(d).chunk(4), y[:, :-1].chunk(4))])"
            ),
        ),
        (
            "loss = F.mse_loss(model(x).squeeze(1), y)",
            (
                "loss = F.mse_loss(torch.cat([checkpoint(model, part, use_reentrant=False) for part in x.chunk(4)])"
                ".squeeze(1), y)"
            ),
        ),
        (
            "out = model(x).logits",
            "out = torch.cat([checkpoint(model, part, use_reentrant=False).logits for part in x.chunk(4)])",
        ),
    ],
)
def test_calls_are_rewritten_as_a_person_would(line, wanted) -> None:
    assert _rewritten(line) == wanted


@pytest.mark.parametrize("given", ["x", "x * 2"])
@pytest.mark.parametrize("path", ["x[0:4]", "local `x['ids']` of train at In[1] line 3"])
def test_a_call_with_a_container_that_was_seen_is_left_to_the_live_form(given: str, path: str) -> None:
    def held(path: str) -> Holding:
        return Holding(bytes=1, device="cuda:0", role=Role.USER_TENSOR, path=path, dtype="float32")

    refused = _rewritten(f"loss = model({given}).sum()", holdings=(held(path),))
    assert isinstance(refused, Refused)
    assert refused.reason == "`x` holds several tensors: it has no parts of a batch"
    assert not isinstance(_rewritten(f"loss = model({given}).sum()", holdings=(held(path), held("x"))), Refused)
    assert not isinstance(_rewritten("loss = model(x[0]).sum()", holdings=(held("x[0:4]"),)), Refused)


def test_without_gradients_the_call_is_only_split() -> None:
    assert _rewritten("out = model(x)", grad_disabled=True) == ("out = torch.cat([model(part) for part in x.chunk(4)])")


def test_every_call_of_a_step_is_rewritten_and_none_of_them_twice() -> None:
    line = "loss = coupled(model(x), model(model(y)), model(x).logits)"
    source = f"import torch\nfor x, y in loader:\n    {line}\n    loss.backward()\n"
    evidence = live.evidence(live.model_facts(), loops=(live.loop(1, 2),))
    found = patch(live.cells_of(source), evidence, FOUR)
    assert isinstance(found, Patch)
    assert found.edits[0].after == (
        """\
import torch
from torch.utils.checkpoint import checkpoint


def in_parts(model, *tensors):
    \"\"\"Run a model over 4 parts of the batch, each recomputed in the backward pass.\"\"\"
    parts = zip(*(tensor.chunk(4) for tensor in tensors), strict=True)
    return torch.cat([checkpoint(model, *part, use_reentrant=False) for part in parts])


for x, y in loader:
    loss = coupled(in_parts(model, x), in_parts(model, in_parts(model, y)), \
torch.cat([checkpoint(model, part, use_reentrant=False).logits for part in x.chunk(4)]))
    loss.backward()
"""
    )
    again = patch(
        live.cells_of(found.edits[0].after), live.evidence(live.model_facts(), loops=(live.loop(1, 12),)), FOUR
    )
    assert isinstance(again, Refused)
    assert again.reason == "`in_parts` gives a model parts of the batch already"
    bare = _rewritten(line, grad_disabled=True)
    assert isinstance(bare, str)
    again = _rewritten(bare, grad_disabled=True)
    assert isinstance(again, Refused)
    assert "parts of the batch already" in again.reason


@pytest.mark.parametrize(
    ("line", "before", "after", "why"),
    [
        ("out, hidden = model(x)", "", "", "more than one tensor"),
        ("out = model(x)[0]", "", "", "a part is used"),
        ("out = model(x)", "", "    loss = out.loss\n", "an object"),
        ("out = model(x)", "", '    loss = out["loss"]\n', "an object"),
        ("out = model(**x)", "", "", "not called by position"),
        ("out = model(x=x)", "", "", "not called by position"),
        ("out = model((x, y))", "", "", "container"),
        ("out = model(x, mask)", "    mask = make(x.size(1))\n", "", "`mask` goes with the batch"),
        ("out = other(x)", "", "", "no call of a model was found"),
    ],
)
def test_calls_that_cannot_be_split_in_the_source_are_refused(line, before, after, why) -> None:
    found = _rewritten(line, before, after)
    assert isinstance(found, Refused)
    assert why in found.reason


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.inner(tokens)


@pytest.mark.parametrize("bind", [lambda forward: forward, lambda forward: functools.partial(forward, mask=None)])
def test_libraries_still_read_what_the_forward_takes(bind) -> None:
    model = Masked()
    if (forward := bind(model.forward)) is not model.forward:
        model.forward = forward
    before = inspect.signature(model.forward)
    assert next(iter(before.parameters)) == "tokens"
    assert FIX.apply is not None
    with FIX.apply(live.session(model=model), Dose.of(chunks=2)):
        assert inspect.signature(model.forward) == before
    assert inspect.signature(model.forward) == before
