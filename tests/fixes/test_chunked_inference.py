from __future__ import annotations

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
from transformers import GPT2Config, GPT2LMHeadModel

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _batch_split, get
from oomdoctor.fixes._batch_split import in_parts
from oomdoctor.fixes.chunks import TOLERANCE
from oomdoctor.fixes.inference_precision import detect_runs
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.unavailable import Refused
from oomdoctor.objects.known import Objects
from oomdoctor.program import definitions

FIX = get("chunked_forward")

FIX = get("chunked_inference")
patch, propose = FIX.patch, FIX.propose

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
        split = in_parts(model, chunks)(x)
    assert split.is_inference() == plain.is_inference()
    torch.testing.assert_close(split, plain, rtol=TOLERANCE, atol=TOLERANCE * float(plain.abs().max()))
    assert torch.equal(marks, torch.get_rng_state())


def test_results_are_equal_up_to_rounding_and_not_to_the_bit() -> None:
    model, x = made(), torch.randn(250, 8)
    with torch.no_grad():
        split = in_parts(model, 64)(x)
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
        split = in_parts(model, 4)(x)
    assert type(split) is type(plain)
    if isinstance(plain, torch.Tensor):
        assert (split.dtype, split.stride()) == (plain.dtype, plain.stride())
    left, right = (vars(one) if isinstance(one, Output) else one for one in (split, plain))
    torch.testing.assert_close(left, right)


def test_needs_less_and_a_large_result_never_exists_twice() -> None:
    model, x = made(width=1024), torch.randn(512, 8)
    wide = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2048)).eval()
    peaks = []
    for net in (model, wide):
        for run in (net, in_parts(net, 16)):
            with torch.no_grad(), live.Peak() as seen:
                run(x)
            peaks.append(seen.peak)
    assert peaks[1] < peaks[0] / 4
    assert peaks[3] < 1.3 * 512 * 2048 * 4


def test_a_sabotaged_split_is_not_equivalent(monkeypatch) -> None:
    model, x = made(), torch.randn(64, 8)
    gathered = _batch_split.gathered
    monkeypatch.setattr(
        _batch_split, "gathered", lambda path, parts, rows: gathered(path, iter(list(parts)[::-1]), rows)
    )
    with torch.no_grad():
        split = in_parts(model, 4)(x)
    with torch.no_grad():
        assert not torch.allclose(split, model(x), rtol=1e-3)


class Coupled(Net):
    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        return self.layers(x - x.mean(0))


class Drawing(Net):
    def forward(self, x: torch.Tensor, **more: Any) -> Any:
        return self.layers(x + torch.randn_like(x))


def test_dropout_and_noise_are_those_of_the_whole_batch() -> None:
    model, x, outs = nn.Sequential(Drawing().eval(), nn.Dropout(0.5)), torch.randn(16, 8), []
    for one in (model, in_parts(model, 5)):
        torch.manual_seed(1)
        with torch.no_grad():
            outs.append((one(x), torch.get_rng_state()))
    torch.testing.assert_close(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])


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
        (Counting().eval(), "changes Counting.calls"),
        (Ragged().eval(), "do not fit together"),
        (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), "over the whole batch"),
        (Net(form=torch.mean).eval(), "a loss"),
        (Net(form=lambda out: torch.cat([out, out], 1).T).eval(), "not made of rows"),
    ],
)
def test_refuses_when_called(model, why) -> None:
    x = torch.randn(16, 8)
    x[:11, 0] = 0
    with torch.no_grad(), pytest.raises(OomDoctorError, match=why):
        in_parts(model, 4)(x)


def test_works_on_tensors_without_values_as_a_forecast_needs_it() -> None:
    with FakeTensorMode(), torch.no_grad():
        model = Net().eval()
        assert in_parts(model, 4)(torch.randn(15, 8)).shape == (15, 4)


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
@@ -1,5 +1,7 @@
 %time pass
+from oomdoctor import in_parts
+
 with torch.no_grad():
-    probabilities = model(X.to(device)).softmax(1)   # of the whole test set
-    predictions = model(X.to(device)).float().cpu().argmax(1).numpy()
-    outputs = model(X)
+    probabilities = in_parts(model, 4)(X).softmax(1)   # of the whole test set
+    predictions = in_parts(model, 4)(X).float().cpu().argmax(1).numpy()
+    outputs = in_parts(model, 4)(X)
"""


def run(*sources: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"Net": Net}
    *before, last = (source.replace("%time pass\n", "") for source in sources)
    for source in before:
        exec(source, namespace)
    with live.Peak() as seen:
        exec(last, namespace)
    return namespace | {"peak": seen.peak}


def patched(found: Evidence, *sources: str) -> Patch | Refused:
    cells, models = live.cells_of(*sources), {"model": made()}
    objects = Objects(namespace=models, modules=tuple(models.items()), kinds={"model": "model"})
    sites = {"chunked_inference": detect_runs(definitions.read(cells), objects)}
    return patch(cells, replace(found, code=replace(found.code, sites=sites)), FOUR)


def test_the_patched_source_needs_less_and_gives_the_same() -> None:
    found = patched(evidence(), SETUP, PREDICT)
    assert isinstance(found, Patch), found
    assert found.diff() == GOLDEN
    (edit,) = found.edits
    assert edit.replay == edit.after
    plain, fixed = run(SETUP, PREDICT), run(SETUP, edit.after)
    for name in ("probabilities", "outputs"):
        torch.testing.assert_close(fixed[name], plain[name], rtol=TOLERANCE, atol=TOLERANCE)
    assert (fixed["predictions"] == plain["predictions"]).all()
    assert fixed["peak"] < plain["peak"]


@pytest.mark.parametrize(
    ("given", "whole"),
    [("X.to('cuda')", "X"), ("X.cuda(), y", "X, y"), ("X.to(dtype)", None), ("X.float()", None), ("z, X.cuda()", None)],
)
def test_parts_of_the_first_tensor_are_moved_one_by_one(given, whole) -> None:
    found = patched(evidence(), f"out = model({given})\n")
    assert isinstance(found, Patch)
    assert f"out = in_parts(model, 4)({whole or given})" in found.edits[0].after


@pytest.mark.parametrize(
    ("source", "found", "why"),
    [
        ("out = predict(X)", evidence(), "no call of a model was found"),
        ("out = in_parts(model, 2)(X)", evidence(), "parts of the batch already"),
        ("out = model(X)", evidence(grad_disabled=False), "gradients on"),
        ("for x, y in loader:\n    out = model(x)", evidence(loops=(live.loop(1, 1),)), "trains as well"),
    ],
)
def test_what_cannot_be_written_is_refused(source, found, why) -> None:
    refused = patched(found, source)
    assert isinstance(refused, Refused)
    assert why in refused.reason


def test_of_a_cell_that_trains_as_well_what_runs_without_gradients_is_split() -> None:
    source = "for x, y in loader:\n    out = model(x)\nwith torch.no_grad():\n    shown = model(X)\n"
    found = patched(evidence(loops=(live.loop(1, 1),)), source)
    assert isinstance(found, Patch)
    assert found.edits[0].after.endswith(source.replace("shown = model(X)", "shown = in_parts(model, 4)(X)"))


def test_a_prediction_of_an_earlier_cells_function_is_split() -> None:
    decorated = "@torch.no_grad()\ndef predict(model, x):\n    return model(x)\n"
    last = PREDICTION.templates[-1].replace("with torch.no_grad():\n    ", "").replace("model(", "predict(model, ")
    family = replace(PREDICTION, name="decorated", templates=(*PREDICTION.templates[:-1], decorated, last))
    assert fail(family).evidence.code.grad_disabled
    assert check(FIX, family, DEFAULT).forms == ("patch",)


def generator(**settings: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, **settings)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("ends", [2, [7, 9, 11, 13, 17, 19, 23]])
@pytest.mark.parametrize("pads", [0, None])
def test_generated_texts_are_padded_as_those_of_the_whole_batch(ends, pads) -> None:
    model = generator(eos_token_id=ends, pad_token_id=pads)
    asked = {"input_ids": torch.randint(3, 50, (13, 5)), "max_new_tokens": 20, "do_sample": False}
    asked["attention_mask"] = torch.ones_like(asked["input_ids"])
    whole = model.generate(**asked)
    assert torch.equal(in_parts(model.generate, 4)(**asked), whole)
    with pytest.raises(OomDoctorError, match="draws random numbers"):
        in_parts(model.generate, 4)(**asked | {"do_sample": True})


def test_a_generation_is_split_though_its_line_has_gradients_on() -> None:
    found = evidence(grad_disabled=False)
    found = replace(found, code=replace(found.code, generates="model.generate(X)"))
    source = "out = model.generate(X, max_new_tokens=8)\n"
    split = patched(found, source)
    assert isinstance(split, Patch), split
    assert split.edits[0].after.endswith("out = in_parts(model.generate, 4)(X, max_new_tokens=8)\n")
    trains = replace(found, code=replace(found.code, loops=(live.loop(1, 1),)))
    assert isinstance(patched(trains, source), Refused)
