from __future__ import annotations

import textwrap
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import live
import pytest
import torch
from observed import facts
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from traces import hooks_pack

from oomdoctor import fixes, simulate
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.fix import Dose, Effect, Patch
from oomdoctor.model.memory import Role
from oomdoctor.model.session import Cells
from oomdoctor.model.unavailable import Refused

FIX = fixes.get("save_on_cpu")
apply, patch, propose = FIX.apply, FIX.patch, FIX.propose

PLAIN = Dose.of(pin_memory=False)
PINNED = Dose.of(pin_memory=True)

SETUP = """\
import torch

torch.manual_seed(0)
with torch.device(device):
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.3), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = torch.nn.MSELoss()
"""
TRAINS = """\
losses = []
for x, y in batches:
    optimizer.zero_grad()

    # one step
    out = model(x.to(device))
    loss = criterion(
        out, y.to(device)
    )
    loss.backward()  # all at once
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.detach())
"""
GOLDEN = """\
--- In[2]
+++ In[2] fixed
@@ -1,13 +1,14 @@
 losses = []
-for x, y in batches:
-    optimizer.zero_grad()
+with torch.autograd.graph.save_on_cpu(pin_memory=True):
+    for x, y in batches:
+        optimizer.zero_grad()
\x20
-    # one step
-    out = model(x.to(device))
-    loss = criterion(
-        out, y.to(device)
-    )
-    loss.backward()  # all at once
-    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
-    optimizer.step()
-    losses.append(loss.detach())
+        # one step
+        out = model(x.to(device))
+        loss = criterion(
+            out, y.to(device)
+        )
+        loss.backward()  # all at once
+        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
+        optimizer.step()
+        losses.append(loss.detach())
"""


def cells_of(*sources: str) -> Cells:
    return live.cells_of(*(textwrap.dedent(source) for source in sources))


def evidence(*sources: str, device: str = "cuda:0", line: int | None = 2, **kwargs: Any) -> Evidence:
    base = live.evidence(**kwargs)
    code = replace(
        facts(cells_of(*sources), {}, [("model", nn.Linear(1, 1))], loaded=(), line=line),
        grad_disabled=base.code.grad_disabled,
    )
    return replace(base, code=code, devices=(replace(base.device, tensor_device=device),))


def patched(*sources: str, dose: Dose = PINNED, line: int | None = 2) -> Patch | Refused:
    return patch(cells_of(*sources), evidence(*sources, line=line), dose)


def run(trains: str, context: Any = None, device: str = "cpu") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(16, 32, generator=generator), torch.ones(16, 1)) for _ in range(5)]
    space: dict[str, Any] = {"device": device, "batches": batches}
    exec(SETUP, space)
    with context or nullcontext():
        exec(trains, space)
    return space | {"rng": torch.get_rng_state()}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return (
        all(torch.equal(a, b) for a, b in zip(left["losses"], right["losses"], strict=True))
        and live.same(live.values(left["model"]), live.values(right["model"]))
        and torch.equal(left["rng"], right["rng"])
    )


def test_golden_diff_and_second_time() -> None:
    made = patched(SETUP, TRAINS)
    assert isinstance(made, Patch), made
    assert made.diff() == GOLDEN
    again = patched(SETUP, made.edits[0].after)
    assert isinstance(again, Refused)
    assert "already" in again.reason


def test_the_same_bits_live_and_patched() -> None:
    plain = run(TRAINS)
    for dose in (PLAIN, PINNED):
        made = patched(SETUP, TRAINS, dose=dose)
        assert isinstance(made, Patch)
        assert same(plain, run(made.edits[0].after))
        assert same(plain, run(TRAINS, apply(live.session(), dose)))


class Saved:
    """Where what autograd saves lies, and how it comes back, told by hooks of its own on a stand-in for a device."""

    def __init__(self, source: str, context: Any) -> None:
        self.places: list[str] = []
        self.strides: list[tuple[Any, Any]] = []
        real = torch.autograd.graph.saved_tensors_hooks.__init__
        seen = self

        def watching(hooks: Any, pack: Any, unpack: Any) -> None:
            def packing(tensor: torch.Tensor) -> Any:
                packed = pack(tensor)
                seen.places.append(packed[1].device.type)
                return packed, tensor.stride()

            def unpacking(packed: Any) -> torch.Tensor:
                tensor = unpack(packed[0])
                seen.strides.append((packed[1], tensor.stride()))
                assert tensor.device.type == "meta"
                return tensor

            real(hooks, packing, unpacking)

        with pytest.MonkeyPatch.context() as monkeypatch, FakeTensorMode():
            monkeypatch.setattr(torch.autograd.graph.saved_tensors_hooks, "__init__", watching)
            self.space = run(source, context() if context else None, device="meta")


def test_what_is_saved_lies_in_host_memory_and_comes_back_to_the_device() -> None:
    made = patched(SETUP, TRAINS, dose=PLAIN)
    assert isinstance(made, Patch)
    for saved in (Saved(TRAINS, lambda: apply(live.session(), PLAIN)), Saved(made.edits[0].after, None)):
        # Five steps of two layers with their weights and inputs, an activation and a loss.
        assert len(saved.places) >= 5 * 6
        assert set(saved.places) == {"cpu"}
        assert all(before == after for before, after in saved.strides)
    assert not Saved(TRAINS, None).places


def test_page_locked_copies_do_lose_the_layout_so_they_promise_less() -> None:
    saved = Saved(TRAINS, lambda: apply(live.session(), PINNED))
    assert set(saved.places) == {"cpu"}
    assert any(before != after for before, after in saved.strides)
    pinned, plain = propose(live.INCIDENT, evidence(SETUP, TRAINS))  # type: ignore[misc]
    assert (pinned.dose, pinned.effect) == (PINNED, Effect.EQUIVALENT)
    assert "contiguous" in pinned.caveat
    assert (plain.dose, plain.effect) == (PLAIN, Effect.EXACT)
    assert FIX.effect is Effect.EXACT
    assert pinned.slowdown < plain.slowdown
    assert pinned.saves == plain.saves == 64 << 20


def test_on_the_stand_in_the_device_holds_less_while_the_graph_is_there() -> None:
    def held(context: Any) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with FakeTensorMode():
            x = torch.empty(16, 32, device="meta", requires_grad=True)
            with context, live.Peak() as seen:
                out = x.exp().exp().exp().sum()
            del seen
            node = out.grad_fn.next_functions[0][0]
            while hasattr(node, "_raw_saved_result"):
                place = node._saved_result.device.type if context is plain else "packed"
                sizes[place] = sizes.get(place, 0) + 16 * 32 * 4
                node = node.next_functions[0][0]
        return sizes

    plain = nullcontext()
    assert held(plain) == {"meta": 3 * 16 * 32 * 4}
    assert held(apply(live.session(), PLAIN)) == {"packed": 3 * 16 * 32 * 4}


def test_what_runs_a_function_of_an_earlier_cell_without_import_torch() -> None:
    made = patched("from torch import nn\n\ndef fit(net): ...", "# all of it\nfit(model)", dose=PLAIN)
    assert isinstance(made, Patch), made
    (edit,) = made.edits
    assert edit.cell == 2
    assert "from torch.autograd.graph import save_on_cpu" in edit.after
    assert "# all of it\nwith save_on_cpu():\n    fit(model)" in edit.after


def test_the_value_that_a_cell_ends_with_is_kept_where_that_is_asked_for() -> None:
    sources = ("import torch\ndef train():\n    return 3", "x = 1\ntrain()  # all of it")
    made = {dose: patched(*sources, dose=dose, line=2) for dose in (PLAIN, PLAIN | FIX.ways[0])}
    plain, valued = (made[dose] for dose in made)
    assert isinstance(plain, Patch)
    assert isinstance(valued, Patch)
    block = "with torch.autograd.graph.save_on_cpu():\n    "
    assert plain.edits[0].after == f"x = 1\n{block}train()  # all of it"
    assert valued.edits[0].after == f"x = 1\n{block}result = train()  # all of it\nresult"
    for other in ("x = train()", "train();"):
        found = [patched(sources[0], other, dose=dose, line=1) for dose in made]
        assert found[0] == found[1]


def test_without_the_line_that_was_running_there_is_no_patch() -> None:
    refused = patched(SETUP, TRAINS, line=None)
    assert isinstance(refused, Refused), refused
    assert "which statement" in refused.reason


def room(found: Evidence, available: int) -> Evidence:
    return replace(found, host=replace(found.host, available=available))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (evidence(SETUP, TRAINS, device="cpu"), "host memory already"),
        (evidence(SETUP, TRAINS, grad_disabled=True), "gradients are off"),
        (evidence(SETUP, "model = build()", roles=((Role.PARAMETER, 1 << 30),)), "no activations"),
        (room(evidence(SETUP, TRAINS), 1 << 20), "1.00 MiB left"),
        (evidence("g = torch.cuda.CUDAGraph()\nwith torch.cuda.graph(g):\n    model(x)"), "captures"),
    ],
)
def test_propose_refuses(found, why) -> None:
    refused = propose(live.INCIDENT, found)
    assert isinstance(refused, Refused)
    assert why in refused.reason


def test_nothing_is_pinned_but_for_cuda() -> None:
    simulated = evidence(SETUP, TRAINS, device="cpu")
    simulated = replace(simulated, devices=(replace(simulated.device, simulated=True),))
    for found in (simulated, evidence(SETUP, TRAINS, device="mps:0")):
        (only,) = propose(live.INCIDENT, found)  # type: ignore[misc]
        assert only.dose == PLAIN


def test_the_virtual_accelerator_has_host_memory_beside_it() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(16)])
    batch, peaks, gradients = torch.randn(1024, 64), [], []
    for context in (nullcontext(), apply(live.session(), PLAIN)):
        model.zero_grad()
        with simulate("64MiB") as device:
            device.reset_peak()
            with context:
                model(batch).sum().backward()
            peaks.append(device.allocator.peak_allocated)
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    assert peaks[1] < peaks[0] / 2
    assert all(map(torch.equal, *gradients))
    with torch.autograd.graph.save_on_cpu():
        assert model(batch).grad_fn is not None  # as PyTorch has it, where none is simulated


CLOSURE = """def closure():
    optimizer.zero_grad()
    loss = criterion(model(batch), target)
    loss.backward()
    return loss

# up to the end
optimizer.step(closure); done = True
"""


def test_what_a_closure_trains_stands_in_it_as_a_whole() -> None:
    made = patched(SETUP, CLOSURE, dose=PLAIN, line=8)
    assert isinstance(made, Patch), made
    (edit,) = made.edits
    before, after = edit.before.split("# up to the end\n"), edit.after.split("# up to the end\n")
    assert after[0] == before[0]
    wrapped = "with torch.autograd.graph.save_on_cpu():\n    optimizer.step(closure)\n    done = True\n"
    assert after[1] == wrapped


@pytest.mark.parametrize("raises", [False, True])
def test_undoes_itself(raises) -> None:
    try:
        with apply(live.session(), PLAIN):
            assert hooks_pack()
            if raises:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not hooks_pack()


@pytest.mark.gpu
@pytest.mark.parametrize("dose", [PLAIN, PINNED])
def test_on_a_gpu_the_peak_is_lower_and_plain_copies_give_the_same_bits(dose) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    results = []
    for context in (nullcontext(), apply(live.session(), dose)):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(16)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        torch.cuda.reset_peak_memory_stats()
        with context:
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(4096, 256, device="cuda")).square().mean().backward()
                optimizer.step()
        results.append((live.values(model), torch.cuda.max_memory_allocated()))
        del model, optimizer
    assert results[1][1] < results[0][1]
    if dose is PLAIN:
        assert live.same(results[0][0], results[1][0])
    else:
        assert live.furthest(results[0][0], results[1][0]) < 1e-5
