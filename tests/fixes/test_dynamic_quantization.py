from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn

from oomdoctor import fixes
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused
from oomdoctor.retry import Transaction

FIX = fixes.get("dynamic_quantization")
patch, propose = FIX.patch, FIX.propose

INT8 = Dose.of(dtype="qint8")

# What torch says of its own quantization, to everyone who uses it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.quantize_per_tensor.*:UserWarning"),
]

PREDICT = """
    # every batch once
    with torch.no_grad():
        for x in batches:
            predictions.append(model(x))
"""
FUNCTION = """
    @torch.no_grad()
    def predict(net):
        return [net(x) for x in batches]
"""
NOTEBOOKS = {
    "top level": ("import torch", PREDICT),
    "function": ("import torch", FUNCTION, "print(len(batches))\npredictions += predict(model)"),
}


def program() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return {"model": model, "batches": [torch.randn(4, 64) for _ in range(3)], "predictions": []}


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def evidence(cells: Cells, model: nn.Module | None = None, **code: Any) -> Evidence:
    namespace = program()
    base = live.evidence()
    known = replace(
        facts(cells, namespace, [("model", model or namespace["model"])]), **{"grad_disabled": True, **code}
    )
    return Evidence(devices=base.devices, host=base.host, censuses=base.censuses, code=known)


def patched(*sources: str, model: nn.Module | None = None) -> Patch | Refused:
    cells = cells_of(*sources)
    return patch(cells, evidence(cells, model), INT8)


def run(sources: tuple[str, ...], made: Patch | None = None) -> dict[str, Any]:
    texts = [textwrap.dedent(source) for source in sources]
    for edit in made.edits if made else ():
        texts[edit.cell - 1] = edit.after
    namespace = program()
    for text in texts:
        exec(compile(text, "<cell>", "exec"), namespace)
    return namespace


def weights(model: nn.Module) -> int:
    """Bytes of all weights, by what each layer gives out as its weight."""
    return sum(
        layer.weight().numel() if callable(layer.weight) else layer.weight.untyped_storage().nbytes()
        for layer in model
        if hasattr(layer, "weight")
    )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_patched_cells_predict_with_a_quarter_of_the_weights(name: str) -> None:
    sources = NOTEBOOKS[name]
    made = patched(*sources)
    assert isinstance(made, Patch), made
    plain, fixed = run(sources), run(sources, made)
    assert weights(fixed["model"]) * 4 == weights(plain["model"])
    assert fixed["model"][0].weight().dtype is torch.qint8
    for left, right in zip(plain["predictions"], fixed["predictions"], strict=True):
        assert torch.allclose(left, right, atol=0.05)
        assert not torch.equal(left, right)
    texts = list(sources)
    for edit in made.edits:
        texts[edit.cell - 1] = edit.after
    assert isinstance(patched(*texts), Refused)


GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -1,3 +1,5 @@
+
+torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
\x20
 # every batch once
 with torch.no_grad():
"""


def test_golden_diff() -> None:
    made = patched(*NOTEBOOKS["top level"])
    assert isinstance(made, Patch)
    assert made.diff() == GOLDEN


TRAIN = "for x in batches:\n    loss = model(x).sum()\n    loss.backward()\n    optimizer.step()\n"


def test_what_is_not_safe_in_source_is_refused() -> None:
    refusals = {
        "one layer": patched(*NOTEBOOKS["top level"], model=nn.Linear(64, 8)),
        "no linear layers": patched(*NOTEBOOKS["top level"], model=nn.Sequential(nn.Conv1d(1, 1, 1))),
        "cannot be trained": patched("import torch", TRAIN),
        "no call of a model": patched("import torch", "print(1)"),
        "do not import `torch`": patched("import torch as th", PREDICT),
    }
    for reason, made in refusals.items():
        assert isinstance(made, Refused), reason
        assert reason in made.reason


def test_proposal() -> None:
    (made,) = propose(live.INCIDENT, evidence(cells_of(*NOTEBOOKS["top level"])))  # type: ignore[misc]
    linear = (64 * 256 + 256 + 256 * 8 + 8) * 4
    assert (made.dose, made.effect, made.saves) == (INT8, Effect.CHANGES_RESULT, linear * 3 // 4)
    assert "rounded to 8 bits" in made.caveat
    assert FIX.apply is None


@pytest.mark.parametrize(
    ("code", "device", "reason"),
    [
        ({"grad_disabled": False}, {}, "may be training"),
        ({"half_weights": True}, {}, "2 bytes each already"),
        ({"models": ()}, {}, "no model with linear layers"),
        ({"loops": (live.loop(1, 1),)}, {}, "cannot be trained"),
        ({}, {"tensor_device": "cuda:0"}, "on the CPU alone"),
        ({}, {"simulated": True}, "on the CPU alone"),
    ],
)
def test_no_proposal(code: dict[str, Any], device: dict[str, Any], reason: str) -> None:
    known = evidence(cells_of(*NOTEBOOKS["top level"]), **code)
    seen = replace(known.devices[0], **device)
    made = propose(live.INCIDENT, replace(known, devices=(seen,)))
    assert isinstance(made, Refused)
    assert reason in made.reason


def test_a_retry_that_fails_puts_the_layers_back() -> None:
    made = patched(*NOTEBOOKS["top level"])
    assert isinstance(made, Patch)
    namespace = program() | {"torch": torch}
    layers, values = list(namespace["model"]), live.values(namespace["model"])
    source = made.edits[0].after + "raise MemoryError"
    transaction = Transaction(namespace, source, lambda: 1 << 30)
    with transaction.armed(strict=True), pytest.raises(MemoryError):
        exec(source, namespace)
    assert list(namespace["model"]) != layers
    transaction.restore()
    assert transaction.losses() == ()
    assert list(namespace["model"]) == layers
    assert namespace["model"].training
    assert live.same(live.values(namespace["model"]), values)
