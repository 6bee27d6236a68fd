"""The extension in a real kernel, from the failure to the healed cell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kernels import Kernel
from programs import BUDGET, DATA, MODEL, PARAMETERS, TRAIN


@pytest.fixture
def ready(kernel: Kernel) -> Kernel:
    """A kernel with a model whose training cell does not fit into the simulated device."""
    kernel.run("%load_ext oomdoctor", ok=True)
    kernel.run(MODEL, ok=True)
    kernel.run(DATA, ok=True)
    assert kernel.run(f"%oomdoctor simulate {BUDGET}", ok=True).text.strip() == ""
    return kernel


def test_loading_is_silent_and_brings_neither_torch_nor_widgets(cold_kernel: Kernel) -> None:
    kernel = cold_kernel
    assert kernel.run("%load_ext oomdoctor", ok=True).messages == []
    assert kernel.value("'torch' in __import__('sys').modules") is False
    assert kernel.run("%load_ext oomdoctor", ok=True).errors == []
    assert kernel.run("%reload_ext oomdoctor", ok=True).messages == []


def test_unloading_leaves_no_trace(kernel: Kernel) -> None:
    for line in ("%load_ext oomdoctor", "%unload_ext oomdoctor", "1 + 1"):  # IPython's own magics load on first use
        kernel.run(line, ok=True)
    marks = """(sorted(k for k in vars(get_ipython()) if k != '_last_input_line'),
        [type(one).__name__ for one in get_ipython().configurables],
        sorted(get_ipython().magics_manager.magics['line']),
        get_ipython().showtraceback.__qualname__, get_ipython().run_cell_async.__qualname__,
        {name: len(found) for name, found in get_ipython().events.callbacks.items()})"""
    before = kernel.value(marks)
    kernel.run("%load_ext oomdoctor", ok=True)
    assert kernel.value(marks) != before
    kernel.run("%unload_ext oomdoctor", ok=True)
    assert kernel.value(marks) == before


def test_magics_of_the_users_own_come_back_where_ours_go(kernel: Kernel) -> None:
    own = "from IPython.core.magic import register_line_magic\n@register_line_magic\n"
    kernel.run(f"{own}def mempeak(line):\n    print('mine', line)", ok=True)
    kernel.run("%load_ext oomdoctor", ok=True)
    assert "mine" not in kernel.run("%mempeak 1 + 1").text
    kernel.run("%unload_ext oomdoctor", ok=True)
    assert kernel.run("%mempeak 1 + 1", ok=True).stdout == "mine 1 + 1\n"


def test_a_failure_is_told_in_one_display_and_the_controls_in_a_second(ready: Kernel) -> None:
    reply = ready.run(TRAIN, ok=False)
    assert reply.kinds[:2] == ["error", "display_data"]
    assert reply.content["ename"] == "OutOfMemoryError"
    static, controls = [m["content"]["data"] for m in reply.messages if m["header"]["msg_type"] == "display_data"]
    assert set(static) == {"text/plain", "text/html"}
    assert "application/vnd.jupyter.widget-view+json" in controls
    for shown in (static["text/plain"], static["text/html"]):
        assert "logits = model(x)" in shown
        assert "128 MiB" in shown
        assert "activations" in shown
        assert "%oomdoctor fix 1" in shown


def test_fix_applies_and_retries(ready: Kernel) -> None:
    ready.run(TRAIN, ok=False)
    reply = ready.run("%oomdoctor fix 1", ok=True)
    assert "healed" in reply.text.lower()
    assert ready.value("len(losses)") == 4
    case = ready.value("__import__('oomdoctor').last_case().to_dict()")
    assert case["outcome"]["kind"] == "healed"
    assert case["outcome"]["state"] == "clean"
    chosen = case["fixes"][0]
    assert case["outcome"]["peak"] <= 128 << 20
    assert chosen["forecast"]["basis"] == "dry run"
    assert abs(chosen["forecast"]["peak"] / case["outcome"]["peak"] - 1) < 0.05


def test_auto_exact_heals_by_itself_and_the_cell_answers_ok(ready: Kernel, start_kernel: Callable[..., Kernel]) -> None:
    ready.run("%oomdoctor auto exact", ok=True)
    reply = ready.run(TRAIN, ok=True)
    assert reply.errors == []
    assert "%oomdoctor diff" in reply.text
    free = start_kernel()
    for cell in (MODEL, DATA, TRAIN):
        free.run(cell, ok=True)
    _assert_close(ready.value(PARAMETERS), free.value(PARAMETERS), relative=1e-5)


def test_the_diff_is_of_the_users_own_cells_and_does_what_the_retry_did(
    ready: Kernel, start_kernel: Callable[..., Kernel]
) -> None:
    ready.run("%oomdoctor auto exact", ok=True)
    ready.run(TRAIN, ok=True)
    diff = ready.run("%oomdoctor diff", ok=True).stdout
    assert diff.startswith("--- In[")
    assert "+" in diff
    case = "__import__('oomdoctor').last_case()"
    edits = ready.value(
        f"[(e.cell, e.after) for c in {case}.plan.candidates if c.label in {case}.outcome.fixes for e in c.patch.edits]"
    )
    fresh = start_kernel()
    cells = {2: MODEL, 3: DATA, 6: TRAIN, **dict(map(tuple, edits))}
    for number in sorted(cells):
        fresh.run(cells[number], ok=True)
    digest = (
        "__import__('oomdoctor.objects.leaves', fromlist=['x'])"
        ".state_digests(globals(), names=frozenset({'model', 'optimizer', 'losses', 'loader', 'x', 'y', 'loss'}))"
    )
    assert ready.value(digest) == fresh.value(digest)


def test_undo_goes_back_to_before_the_cell(ready: Kernel) -> None:
    before = ready.value(PARAMETERS)
    ready.run("%oomdoctor auto exact", ok=True)
    ready.run(TRAIN, ok=True)
    assert ready.value(PARAMETERS) != before
    ready.run("%oomdoctor undo", ok=True)
    assert ready.value(PARAMETERS) == before
    assert ready.value("losses") == []


def test_a_case_expires_when_a_later_cell_moves_the_state_on(ready: Kernel) -> None:
    ready.run(TRAIN, ok=False)
    ready.run("len(losses)", ok=True)
    ready.run("%memreport", ok=True)
    ready.run("losses.append(1.0)", ok=True)
    reply = ready.run("%oomdoctor fix 1", ok=True)
    assert "can no longer be retried" in reply.stderr
    assert ready.value("losses") == [1.0]


def test_memreport_accounts_for_what_is_allocated(ready: Kernel) -> None:
    assert "model.blocks[0].up.weight" in ready.run("%memreport --top 100", ok=True).text
    report = ready.value("__import__('oomdoctor').report(globals()).to_dict()")
    assert report["schema"] == 1
    assert report["evidence"]["census"]["accounted_ratio"] > 0.99


def test_an_async_cell_is_healed_too(ready: Kernel) -> None:
    ready.run("%oomdoctor auto exact", ok=True)
    ready.run("import asyncio", ok=True)
    ready.run("await asyncio.sleep(0)\n" + TRAIN, ok=True)
    assert ready.value("len(losses)") == 4


def _assert_close(left: list[list[float]], right: list[list[float]], *, relative: float) -> None:
    for one, other in zip(left, right, strict=True):
        scale = max(map(abs, other))
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= relative * scale


def test_what_cannot_be_taken_back_refuses_the_retry_and_leaves_everything_as_it_was(ready: Kernel) -> None:
    ready.run("%oomdoctor auto exact", ok=True)
    reply = ready.run("open('log.txt', 'a').write('began')\n" + TRAIN, ok=False)
    assert reply.content["ename"] == "OutOfMemoryError"
    case = ready.value("__import__('oomdoctor').last_case().to_dict()")
    assert case["outcome"]["kind"] == "refused"
    assert "open('log.txt', 'a')" in case["outcome"]["why"]
    assert "open('log.txt', 'a')" in reply.text
    anyway = ready.run("%oomdoctor fix 1 --anyway", ok=True)
    assert "Healed" in anyway.text
    assert ready.value("__import__('oomdoctor').last_case().outcome.state") == "unverified"
    assert ready.value("open('log.txt').read()") == "beganbegan"


def test_a_fix_that_finds_the_model_unfit_is_refused_and_the_users_error_stands(ready: Kernel) -> None:
    """The model couples the samples of a batch, which neither its source nor its type tells."""
    ready.run("forward = Net.forward\nNet.forward = lambda self, x: forward(self, x - x.mean(0))", ok=True)
    before = ready.value(PARAMETERS)
    ready.run(TRAIN, ok=False)
    refused = ready.run("%oomdoctor fix micro_batch", ok=True)
    case = ready.value("__import__('oomdoctor').last_case().to_dict()")
    assert case["outcome"]["kind"] == "refused"
    assert case["outcome"]["attempts"] == 0
    assert "results differ: " in case["outcome"]["why"]
    assert "the state before it is restored" in refused.text
    assert ready.value(PARAMETERS) == before
    assert "Recompute parts of the model" in ready.run("%oomdoctor retry", ok=True).text
    assert ready.value("__import__('oomdoctor').last_case().outcome.fixes")[0].startswith("checkpoint_blocks")


def test_a_retry_needs_a_cell_of_its_own_and_a_state_that_stands_still(ready: Kernel) -> None:
    ready.run(TRAIN, ok=False)
    shared = ready.run("kept = 5\n%oomdoctor fix 1", ok=True)
    assert "needs a cell of its own" in shared.stderr
    assert ready.value("kept") == 5
    assert ready.value("losses") == []
    ready.run(TRAIN, ok=False)
    ready.run("optimizer.param_groups[0].__setitem__('lr', 0.001)", ok=True)
    assert "can no longer be retried" in ready.run("%oomdoctor fix 1", ok=True).stderr
    assert ready.value("optimizer.param_groups[0]['lr']") == 0.001


def test_after_undo_another_fix_can_be_tried(ready: Kernel) -> None:
    ready.run(TRAIN, ok=False)
    assert "Healed" in ready.run("%oomdoctor fix 1", ok=True).text
    ready.run("%oomdoctor undo", ok=True)
    assert ready.value("losses") == []
    assert "Healed" in ready.run("%oomdoctor fix 2", ok=True).text
    assert ready.value("len(losses)") == 4


def test_what_a_retry_shows_is_kept_as_the_result_of_its_cell_until_it_is_undone(kernel: Kernel) -> None:
    kernel.run("%load_ext oomdoctor\nimport torch", ok=True)
    kernel.run("%oomdoctor simulate 96MiB", ok=True)
    kernel.run("torch.ones(1 << 24)", ok=True)
    first = kernel.run("'of the first'", ok=True).content["execution_count"]
    failed = kernel.run("big = torch.ones(1 << 23)\nbig = big * 2 + 1\nbig[0].item()", ok=False)
    number = failed.content["execution_count"]
    assert "Healed" in kernel.run("%oomdoctor fix clear_output_cache", ok=True).text
    assert kernel.value(f"[Out[{first}], Out[{number}], _{number}, _]") == ["of the first", 3.0, 3.0, 3.0]
    kernel.run("%oomdoctor undo", ok=True)
    undone = f"[_, Out[{first}], {number} in Out, '_{number}' in globals()]"
    assert kernel.value(undone) == ["of the first", "of the first", False, False]


def test_outputs_that_were_shown_are_freed(kernel: Kernel) -> None:
    kernel.run("%load_ext oomdoctor\nimport torch", ok=True)
    kernel.run("%oomdoctor simulate 96MiB", ok=True)
    kernel.run("torch.ones(1 << 24)", ok=True)
    kernel.run("1 + 1", ok=True)
    reply = kernel.run("big = torch.ones(1 << 23)\nbig = big * 2 + 1", ok=False)
    assert "Out[" in reply.text
    assert "Healed" in kernel.run("%oomdoctor fix clear_output_cache", ok=True).text
    assert kernel.value("big[0].item()") == 3.0
