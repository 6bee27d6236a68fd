from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import live
import pytest
import torch
from models.habits import PREDICTION
from promises import check
from running import fail
from settings import DEFAULT
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _split
from oomdoctor.fixes.chunked_inference import FIX, TOLERANCE, apply, moved_inwards, patch, propose
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role

FOUR = Dose.of(chunks=4)


class Net(nn.Module):
    def __init__(self, form: Any = None, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 4))
        self.form = form

    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        out = self.layers(x) + sum(one for one in more.values() if isinstance(one, torch.Tensor))
        return out if self.form is None else self.form(out)


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


def made(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).eval()


def evidence(*models: Any, grad_disabled: bool = True, **more: Any) -> Evidence:
    return live.evidence(*(models or (live.model_facts(training=False),)), grad_disabled=grad_disabled, **more)


@pytest.mark.parametrize("rows", [256, 250, 7, 1])
@pytest.mark.parametrize("chunks", [2, 4, 16, 64])
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_predictions_are_equivalent(rows, chunks, off) -> None:
    model, x, marks = made(), torch.randn(rows, 8), torch.get_rng_state()
    with off():
        plain = model(x)
        with apply(live.session(model=model), Dose.of(chunks=chunks)):
            split = model(x)
    assert split.is_inference() == plain.is_inference()
    torch.testing.assert_close(split, plain, rtol=TOLERANCE, atol=TOLERANCE * float(plain.abs().max()))
    assert torch.equal(marks, torch.get_rng_state())


def test_results_are_equal_up_to_rounding_and_not_to_the_bit() -> None:
    model, x = made(), torch.randn(250, 8)
    with torch.no_grad(), apply(live.session(model=model), Dose.of(chunks=64)):
        split = model(x)
    with torch.no_grad():
        assert not torch.equal(split, model(x))
    assert FIX.effect is Effect.EQUIVALENT
    assert FIX.tolerance == TOLERANCE


@pytest.mark.parametrize(
    "form",
    [
        lambda out: (out, out * 2),
        lambda out: {"a": out, "b": None},
        lambda out: Output(logits=out, hidden=(out, out + 1)),
        lambda out: out[:, :, None, None].expand(-1, -1, 2, 2).contiguous(memory_format=torch.channels_last),
        lambda out: out.argmax(1),
        lambda out: out.bfloat16(),
    ],
)
def test_outputs_of_any_form_are_put_together(form) -> None:
    model, x = made(form=form), torch.randn(10, 8)
    with torch.no_grad():
        plain = model(x)
        with apply(live.session(model=model), FOUR):
            split = model(x)
    assert type(split) is type(plain)
    if isinstance(plain, torch.Tensor):
        assert (split.dtype, split.stride()) == (plain.dtype, plain.stride())
    left, right = (vars(one) if isinstance(one, Output) else one for one in (split, plain))
    torch.testing.assert_close(left, right)


def test_keyword_arguments_and_inner_models_are_split_once() -> None:
    inner, rows = made(), []
    inner.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))

    class Outer(Net):
        def forward(self, x: torch.Tensor, **more: Any) -> Any:
            return inner(self.layers(x).repeat(1, 2))

    outer = Outer().eval()
    with torch.no_grad(), apply(live.session(outer=outer, inner=inner), Dose.of(chunks=2)):
        outer(torch.randn(16, 8))
        assert rows == [8, 8]
        assert inner(torch.randn(16, 8), y=torch.randn(16, 4)).shape == (16, 4)


def test_needs_less_and_a_large_result_never_exists_twice() -> None:
    model, x = made(width=1024), torch.randn(512, 8)
    wide = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2048)).eval()
    peaks = []
    for net in (model, wide):
        for context in (nullcontext(), apply(live.session(net=net), Dose.of(chunks=16))):
            with context, torch.no_grad(), live.Peak() as seen:
                net(x)
            peaks.append(seen.peak)
    assert peaks[1] < peaks[0] / 4
    assert peaks[3] < 1.3 * 512 * 2048 * 4


def test_with_gradients_it_runs_as_it_is() -> None:
    model, x = made(), torch.randn(16, 8)
    model.train()
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    plain = twin(x)
    with apply(live.session(model=model), FOUR):
        torch.manual_seed(1)
        assert torch.equal(model(x), plain)


def test_a_sabotaged_split_is_not_equivalent(monkeypatch) -> None:
    model, x = made(), torch.randn(64, 8)
    gathered = _split.gathered
    monkeypatch.setattr(_split, "gathered", lambda path, parts, rows: gathered(path, iter(list(parts)[::-1]), rows))
    with torch.no_grad(), apply(live.session(model=model), FOUR):
        split = model(x)
    with torch.no_grad():
        assert not torch.allclose(split, model(x), rtol=1e-3)


class Coupled(Net):
    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        return self.layers(x - x.mean(0))


class Drawing(Net):
    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        return self.layers(x + torch.randn_like(x))


class Counting(Net):
    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return self.layers(x)


class Ragged(Net):
    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        return self.layers(x)[:, : 4 if float(x[0, 0]) == 0 else 3]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Drawing().eval(), "draws random numbers"),
        (Counting().eval(), "changes model.calls"),
        (Ragged().eval(), "do not fit together"),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), "training mode"),
        (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), "over the whole batch"),
        (Net(form=torch.mean).eval(), "a loss"),
        (Net(form=lambda out: torch.cat([out, out], 1).T).eval(), "not made of rows"),
    ],
)
def test_refuses_when_called(model, why) -> None:
    x = torch.randn(16, 8)
    x[:12, 0] = 0
    with torch.no_grad(), apply(live.session(model=model), FOUR), pytest.raises(OomDoctorError, match=why):
        model(x)


@pytest.mark.parametrize("raises", [False, True])
def test_undoes_itself_to_the_last_attribute(raises) -> None:
    model = made()
    before, marks = live.digest(model), torch.get_rng_state()
    try:
        with apply(live.session(model=model), FOUR), torch.no_grad():
            assert live.digest(model) != before
            model(torch.ones(8, 8))
            if raises:
                raise MemoryError
    except MemoryError:
        pass
    assert live.digest(model) == before
    assert torch.equal(marks, torch.get_rng_state())


def test_replicated_and_hooked_models_are_refused_before_anything_changes() -> None:
    hooked = made()
    hooked.layers[0].register_forward_pre_hook(lambda *a: None)
    for model, why in ((nn.DataParallel(made()), "left as it is"), (hooked, "hooks"), (nn.ReLU(), "no model")):
        before = live.digest(model)
        with pytest.raises(OomDoctorError, match=why), apply(live.session(model=model), FOUR):
            pass
        assert live.digest(model) == before


def test_works_on_tensors_without_values_as_a_forecast_needs_it() -> None:
    with FakeTensorMode(), torch.no_grad():
        model = Net().eval()
        with apply(live.session(model=model), FOUR):
            assert model(torch.randn(15, 8)).shape == (15, 4)


def test_proposals() -> None:
    found = propose(live.INCIDENT, evidence())
    assert not isinstance(found, Refused)
    assert [one.dose.number("chunks") for one in found] == [2, 4, 16, 64]
    assert [one.saves for one in found] == [65 * (1 << 20) * (n - 1) // n for n in (2, 4, 16, 64)]
    assert {one.effect for one in found} == {Effect.EQUIVALENT}
    batch = Holding(bytes=1, device="cuda:0", role=Role.BATCH, path="x", shape=(6, 8))
    few = propose(live.INCIDENT, evidence(holdings=(batch,)))
    assert not isinstance(few, Refused)
    assert [one.dose.number("chunks") for one in few] == [2, 4]


ONE = Holding(bytes=1, device="cuda:0", role=Role.BATCH, path="x", shape=(1, 8))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (evidence(grad_disabled=False), "gradients on"),
        (live.evidence(grad_disabled=True), "no model"),
        (evidence(live.model_facts(batch_norm=("norm",))), "model.norm takes its statistics"),
        (evidence(live.model_facts(dropout=("drop",))), "training mode"),
        (evidence(live.model_facts(training=False, sequence_first=("rnn",))), "dimension 1"),
        (evidence(holdings=(ONE,)), "one sample"),
    ],
)
def test_proposes_nothing_where_it_cannot_hold(found, why) -> None:
    refused = propose(live.INCIDENT, found)
    assert isinstance(refused, Refused)
    assert why in refused.reason


def test_proposes_nothing_without_activations() -> None:
    nothing = propose(replace(live.INCIDENT, requested=None), evidence(roles=()))
    assert isinstance(nothing, Refused)
    assert "no activations" in nothing.reason


SETUP = "import torch\ntorch.manual_seed(0)\nmodel = Net().eval()\ndevice = 'cpu'\nX = torch.randn(250, 8)\n"
PREDICT = """\
%time pass
with torch.no_grad():
    probabilities = model(X.to(device)).softmax(1)   # of the whole test set
    predictions = model(X.to(device)).float().cpu().argmax(1).numpy()
    outputs = model(X)
"""
GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -1,5 +1,5 @@
 %time pass
 with torch.no_grad():
-    probabilities = model(X.to(device)).softmax(1)   # of the whole test set
-    predictions = model(X.to(device)).float().cpu().argmax(1).numpy()
-    outputs = model(X)
+    probabilities = torch.cat([model(part.to(device)) for part in X.chunk(4)]).softmax(1)   # of the whole test set
+    predictions = torch.cat([model(part.to(device)).float().cpu() for part in X.chunk(4)]).argmax(1).numpy()
+    outputs = torch.cat([model(part) for part in X.chunk(4)])
"""


def run(*sources: str, context: Any = None) -> dict[str, Any]:
    namespace: dict[str, Any] = {"Net": Net}
    *before, last = (source.replace("%time pass\n", "") for source in sources)
    for source in before:
        exec(source, namespace)
    chosen = apply(live.session(model=namespace["model"]), FOUR) if context else nullcontext()
    with chosen, live.Peak() as seen:
        exec(last, namespace)
    return namespace | {"peak": seen.peak}


def test_the_patched_source_gives_the_numbers_of_the_live_change() -> None:
    cells = live.cells_of(SETUP, PREDICT)
    found = patch(cells, evidence(), FOUR)
    assert isinstance(found, Patch), found
    assert found.diff() == GOLDEN
    (edit,) = found.edits
    assert edit.replay == edit.after
    plain, patched, applied = run(SETUP, PREDICT), run(SETUP, edit.after), run(SETUP, PREDICT, context=True)
    for name in ("probabilities", "outputs"):
        assert torch.equal(patched[name], applied[name])
        torch.testing.assert_close(patched[name], plain[name], rtol=TOLERANCE, atol=TOLERANCE)
    assert (patched["predictions"] == plain["predictions"]).all()
    assert patched["peak"] < plain["peak"]
    assert isinstance(patch(live.cells_of(SETUP, edit.after), evidence(), FOUR), Refused)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f(part).logits for part in x.to(d).chunk(2)", "f(part.to(d)).logits for part in x.chunk(2)"),
        ("f(part) for part in x.float().cuda().chunk(2)", "f(part.float().cuda()) for part in x.chunk(2)"),
        ("f(*part) for part in zip(x.to(d).chunk(2), y.chunk(2))",) * 2,
        ("f(other) for other in x.to(d).chunk(2)",) * 2,
        ("f(part) for part in x[:, None].chunk(2)",) * 2,
    ],
)
def test_batches_are_moved_by_parts(before, after) -> None:
    assert moved_inwards(f"y = torch.cat([{before}])\n", "part") == f"y = torch.cat([{after}])\n"


@pytest.mark.parametrize(
    ("end", "inside", "left"),
    [
        (".detach().cpu().numpy()", ".detach().cpu()", ".numpy()"),
        (".to('cpu')", ".to('cpu')", ""),
        (".float()", "", ".float()"),
        (".sum(0).cpu()", "", ".sum(0).cpu()"),
    ],
)
def test_results_go_to_the_host_by_parts(end, inside, left) -> None:
    source = f"y = torch.cat([f(part) for part in x.chunk(2)]){end}\n"
    assert moved_inwards(source, "part") == f"y = torch.cat([f(part){inside} for part in x.chunk(2)]){left}\n"


@pytest.mark.parametrize(
    ("source", "found", "why"),
    [
        ("out, h = model(X)", evidence(), "more than one tensor"),
        ("out = model(**X)", evidence(), "not called by position"),
        ("out = predict(X)", evidence(), "no call of a model was found in the failing cell"),
        ("out = model(X)", evidence(grad_disabled=False), "gradients on"),
        ("out = model(X)", evidence(live.model_facts(dropout=("drop",))), "training mode"),
        ("for x, y in loader:\n    out = model(x)", evidence(loops=(live.loop(1, 1),)), "trains as well"),
    ],
)
def test_what_cannot_be_written_is_refused(source, found, why) -> None:
    refused = patch(live.cells_of(source), found, FOUR)
    assert isinstance(refused, Refused)
    assert why in refused.reason


def test_a_prediction_of_an_earlier_cells_function_is_split_live() -> None:
    decorated = "@torch.no_grad()\ndef predict(model, x):\n    return model(x)\n"
    last = PREDICTION.templates[-1].replace("with torch.no_grad():\n    ", "").replace("model(", "predict(model, ")
    family = replace(PREDICTION, name="decorated", templates=(*PREDICTION.templates[:-1], decorated, last))
    assert fail(family).evidence.code.grad_disabled
    assert check(FIX, family, DEFAULT).forms == ("live",)
