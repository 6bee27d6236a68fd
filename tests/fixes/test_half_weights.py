from __future__ import annotations

import textwrap
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import live
import numpy as np
import pytest
import torch
from observed import facts
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from oomdoctor import fixes
from oomdoctor.fixes import _forward
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Holding, Role
from oomdoctor.model.session import Cell, Cells
from oomdoctor.model.unavailable import Refused
from oomdoctor.retry import Transaction

FIX = fixes.get("half_weights")
guard, patch, propose = FIX.guard, FIX.patch, FIX.propose

BF16, FP16 = Dose.of(dtype="bfloat16"), Dose.of(dtype="float16")

PREDICT = """
    # all of the test set
    with torch.no_grad():
        for x, _ in batches:
            out = model(x)
            predictions.append(out.softmax(1).cpu().numpy())
"""
DIRECT = """
    with torch.inference_mode():
        for x, y in batches:
            predictions.append(model(x.to("cpu")).numpy())
"""
FUNCTION = """
    @torch.no_grad()
    def predict(net, data):
        return [net(x).detach().numpy() for x, _ in data]
"""
STATEMENT = """
    @torch.no_grad()
    def predict(net, data):
        found = []
        for x, _ in data:
            logits = net(x)
            found.append(logits.numpy())
        return found
"""
NOTEBOOKS = {
    "top level": ("import torch", PREDICT),
    "direct": ("import torch", DIRECT),
    "function": ("import torch", FUNCTION, "model.eval()\npredictions += predict(model, batches)"),
    "statement": ("import torch", STATEMENT, "predictions += predict(model, batches)"),
}


def program() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))
    batches = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(3)]
    return {"model": model, "batches": batches, "predictions": []}


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def batch(path: str = "local `x` of predict", dtype: str = "float32") -> Holding:
    return Holding(bytes=1 << 10, device="cuda:0", role=Role.BATCH, path=path, dtype=dtype, shape=(16, 8))


def evidence(cells: Cells, *holdings: Holding, **code: Any) -> Evidence:
    namespace = program()
    base = live.evidence(holdings=holdings, roles=((Role.PARAMETER, 8 << 20), (Role.ACTIVATION, 2 << 20)))
    known = replace(facts(cells, namespace, [("model", namespace["model"])]), **{"grad_disabled": True, **code})
    return Evidence(devices=base.devices, host=base.host, censuses=base.censuses, code=known)


def patched(*sources: str, holding: Holding | None = None, dose: Dose = BF16) -> Patch | Refused:
    cells = cells_of(*sources)
    return patch(cells, evidence(cells, holding or batch()), dose)


def run(sources: tuple[str, ...], made: Patch | None = None, *, retried: bool = False) -> dict[str, Any]:
    texts = [textwrap.dedent(source) for source in sources]
    for edit in made.edits if made else ():
        texts[edit.cell - 1] = edit.replay if retried else edit.after
    namespace = program()
    for text in texts:
        exec(compile(text, "<cell>", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("dose", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_patched_cells_predict_with_half_the_weights(name: str, dose: Dose) -> None:
    sources = NOTEBOOKS[name]
    made = patched(*sources, dose=dose)
    assert isinstance(made, Patch), made
    plain, fixed, retried = run(sources), run(sources, made), run(sources, made, retried=True)
    sizes = [sum(p.untyped_storage().nbytes() for p in space["model"].parameters()) for space in (plain, fixed)]
    assert sizes[1] * 2 == sizes[0]
    for left, right, again in zip(plain["predictions"], fixed["predictions"], retried["predictions"], strict=True):
        assert right.dtype == (np.float32 if dose == BF16 else np.float16)
        assert np.allclose(left, right, rtol=0.05, atol=0.02)
        assert not np.array_equal(left, right)
        assert np.array_equal(right, again)
    texts = list(sources)
    for edit in made.edits:
        texts[edit.cell - 1] = edit.after
    assert isinstance(patched(*texts, dose=dose), Refused)


GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -1,6 +1,8 @@
+
+model.to(torch.bfloat16)
\x20
 # all of the test set
 with torch.no_grad():
     for x, _ in batches:
-        out = model(x)
-        predictions.append(out.softmax(1).cpu().numpy())
+        out = model(x.to(torch.bfloat16))
+        predictions.append(out.softmax(1).cpu().float().numpy())
"""


def test_golden_diff() -> None:
    made = patched(*NOTEBOOKS["top level"])
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN


def test_token_numbers_are_not_cast() -> None:
    made = patched("import torch", "with torch.no_grad():\n    out = model(ids)", holding=batch("ids", "int64"))
    assert isinstance(made, Patch)
    assert made.edits[0].after == "model.to(torch.bfloat16)\n\nwith torch.no_grad():\n    out = model(ids)"


def test_peak_goes_down() -> None:
    peaks = []
    for made in (None, patched(*NOTEBOOKS["top level"])):
        assert not isinstance(made, Refused)
        namespace = program()
        namespace["model"] = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 4))
        source = made.edits[0].after if made else textwrap.dedent(PREDICT)
        exec("import torch\n" + source, namespace)
        held = sum(p.untyped_storage().nbytes() for p in namespace["model"].parameters())
        with live.Peak() as seen:
            exec(source.replace("model.to(torch.bfloat16)\n", ""), namespace)
        peaks.append(held + seen.peak)
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize(
    ("argument", "path"),
    [
        ("(x - mean) / std", "x"),
        ("x[None]", "local `x` of predict at In[2] line 3"),
        ("x.view(16, -1).contiguous()", "x"),
        ("batch['x']", "local `batch['x']` of predict at In[2] line 3"),
        ("unseen.to(device)", "another"),
        ("torch.cat([x, x])", "x"),
    ],
)
def test_an_argument_that_is_a_tensor_is_cast(argument: str, path: str) -> None:
    cells = cells_of("import torch", f"with torch.no_grad():\n    out = model({argument})")
    made = patch(cells, evidence(cells, batch(path)), BF16)
    assert isinstance(made, Patch), made
    inner = f"({argument})" if "/" in argument else argument
    assert f"model({inner}.to(torch.bfloat16))" in made.diff()


def test_what_is_a_number_already_is_not_widened() -> None:
    made = patched("import torch", "with torch.no_grad():\n    out = model(x)\n    y = out.argmax(1).numpy()")
    assert isinstance(made, Patch)
    assert "y = out.argmax(1).numpy()" in made.edits[0].after


def test_a_model_that_the_cell_makes_is_cast_behind_that() -> None:
    made = patched("import torch", "model = nn.Linear(8, 4)\nwith torch.no_grad():\n    y = model(x)")
    assert isinstance(made, Patch)
    assert made.edits[0].after.startswith("model = nn.Linear(8, 4)\nmodel.to(torch.bfloat16)\nwith")


TRAIN = "for x, y in batches:\n    loss = model(x).sum()\n    loss.backward()\n    optimizer.step()\n"
REFUSALS = {
    "already": ("model.half()\n" + textwrap.dedent(PREDICT), "chooses the precision already"),
    "training": (TRAIN, "the failing cell trains"),
    "no model": ("print(1)", "no call of a model"),
    "unpacked": (PREDICT.replace("model(x)", "model(*x)"), "cast, one by one"),
    "a dictionary unpacked": (PREDICT.replace("model(x)", "model(x, **cache)"), "cast, one by one"),
    "a list": (PREDICT.replace("model(x)", "model([x, x])"), "which is no tensor"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_safe_in_source_is_refused(name: str) -> None:
    source, reason = REFUSALS[name]
    made = patched("import torch", source)
    assert isinstance(made, Refused), made.diff()
    assert reason in made.reason


def test_torch_that_a_module_of_the_user_s_own_imports_is_not_known_to_the_cells() -> None:
    module = Cell(number=-1, source="import torch\n", file="tools.py")
    cells = Cells(history=(module, *cells_of(PREDICT).history))
    made = patch(cells, evidence(cells, batch("x")), BF16)
    assert isinstance(made, Refused)
    assert "do not import `torch`" in made.reason


def test_an_input_is_known_by_its_name_in_whatever_role() -> None:
    cells = cells_of("import torch", PREDICT)
    seen = replace(batch("x"), role=Role.USER_TENSOR)
    made = patch(cells, evidence(cells, seen, batch("y", "int64")), BF16)
    assert isinstance(made, Patch)
    assert "model(x.to(torch.bfloat16))" in made.diff()


def test_inputs_that_were_not_seen_are_refused() -> None:
    cells = cells_of("import torch", PREDICT)
    mixed = evidence(cells, batch("other"), batch("another", "int64"))
    for known in (evidence(cells), mixed):
        made = patch(cells, known, BF16)
        assert isinstance(made, Refused)
        assert "of which type `x` is was not seen" in made.reason
    assert isinstance(patched("from torch import nn", PREDICT), Refused)


def test_proposal() -> None:
    cells = cells_of("import torch", PREDICT)
    (made,) = propose(live.INCIDENT, evidence(cells))  # type: ignore[misc]
    assert (made.dose, made.effect, made.saves) == (BF16, Effect.CHANGES_RESULT, 5 << 20)
    assert made.caveat == (
        "weights and results are rounded to bfloat16, 8 significant bits in place of 24, and the weights stay so"
    )
    assert made.basis == "half of 8.00 MiB of weights and 2.00 MiB of activations in the census"
    assert FIX.apply is None


@pytest.mark.parametrize(
    ("sources", "code", "reason"),
    [
        (("import torch", TRAIN), {}, "the failing cell trains"),
        (("import torch", PREDICT), {"grad_disabled": False}, "may be training"),
        (("import torch", PREDICT), {"half_weights": True}, "16 bits already"),
        (("import torch", PREDICT), {"autocast": True}, "16 bits already"),
        (("import torch", PREDICT), {"models": ()}, "no model"),
    ],
)
def test_no_proposal(sources: tuple[str, ...], code: dict[str, Any], reason: str) -> None:
    made = propose(live.INCIDENT, evidence(cells_of(*sources), **code))
    assert isinstance(made, Refused)
    assert reason in made.reason


def test_weights_elsewhere_are_no_reason() -> None:
    known = evidence(cells_of("import torch", PREDICT))
    census = replace(known.censuses[0], roles=((Role.ACTIVATION, 1 << 20),))
    made = propose(live.INCIDENT, replace(known, censuses=(census,)))
    assert isinstance(made, Refused)
    assert "no weights on cuda:0" in made.reason


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_retry_that_fails_puts_the_weights_back(is_guarded: bool) -> None:
    made = patched(*NOTEBOOKS["top level"])
    assert isinstance(made, Patch)
    namespace = program() | {"torch": torch}
    before, values = live.digest(namespace["model"]), live.values(namespace["model"])
    apply = vars(nn.Module)["_apply"]
    source = made.edits[0].after + "raise MemoryError"
    transaction = Transaction(namespace, source, lambda: 1 << 30)
    watch = guard(live.session(namespace=namespace), BF16) if is_guarded else nullcontext()
    with watch, transaction.armed(strict=True), pytest.raises(MemoryError):
        exec(source, namespace)
    assert namespace["model"][0].weight.dtype is torch.bfloat16
    transaction.restore()
    assert vars(nn.Module)["_apply"] is apply
    assert (transaction.losses() == ()) is is_guarded
    assert live.same(live.values(namespace["model"]), values) is is_guarded
    assert not is_guarded or live.digest(namespace["model"]) == before


def test_a_forecast_counts_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda *args: steps.append(args))
    try:
        with monkeypatch.context() as forecast:
            forecast.setattr(_forward, "is_dry_run", lambda: True)
            with guard(live.session(), BF16):
                nn.Linear(2, 2).to(torch.bfloat16)
        assert not steps
        with guard(live.session(), BF16):
            nn.Linear(2, 2).to(torch.bfloat16)
            nn.Linear(2, 2).to(torch.bfloat16)
        assert len(steps) == 1
    finally:
        handle.remove()
