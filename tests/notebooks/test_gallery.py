"""The gallery: each notebook executed in a real kernel, and what its story claims held against what came out."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from executed import NOTEBOOKS, Executed, execute

NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
CASE = "oomdoctor.last_case().to_dict()"
FIRST = "01_first_oom"  # the demo's, with tests of its own
ON_THE_CPU = {"07_host_memory", "09_several_ranks", "10_jittor"}
MOST_CELLS = 14
MOST_BYTES = 500_000
GALLERY = runpy.run_path(str(NOTEBOOKS.parent / "tools" / "execute_gallery.py"))


def sizes(text: str) -> list[float]:
    """The sizes in MiB that a text tells, in their order."""
    return [float(size) for size in re.findall(r"([0-9.]+) MiB", text)]


def shows_a_picture(run: Executed) -> None:
    (png,) = run.data("picture", "image/png")
    assert len(png) > 5000  # base64 of more than an empty frame


def source(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    return found


def test_the_gallery_is_there() -> None:
    assert [name[:2] for name in NAMES] == ["01", "02", "03", "04", "05", "06", "07", "08", "09", "10"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_short(name: str) -> None:
    cells = source(name)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) <= (MOST_CELLS if name != FIRST else 16)
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert cells[0]["source"][0].startswith("# ")


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_executed(name: str) -> None:
    """``make gallery`` executes them, and what came out is that of the cells as they are."""
    notebook, text = source(name), (NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8")
    assert notebook["metadata"][GALLERY["DIGEST"]] == GALLERY["digest"](notebook), "run: make gallery"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    failed = [any(output["output_type"] == "error" for output in cell["outputs"]) for cell in code]
    assert failed == ["raises-exception" in cell["metadata"].get("tags", ()) for cell in code]
    assert len(text) < MOST_BYTES
    # What is alive, and what is of one machine.
    assert "vnd.jupyter.widget" not in text
    assert not re.search(r"/(?:home|root|work|Users)/", text)


def test_a_notebook_that_was_edited_and_not_executed_is_told() -> None:
    notebook = source(FIRST)
    notebook["cells"][1]["source"].append("\nanother = 1")
    assert notebook["metadata"][GALLERY["DIGEST"]] != GALLERY["digest"](notebook)


def test_the_first_cell_of_the_first_installs_on_colab_alone() -> None:
    code = [cell for cell in source(FIRST)["cells"] if cell["cell_type"] == "code"]
    install = "".join(code[0]["source"])
    assert install.splitlines()[-1] == "    %pip install --quiet oomdoctor"
    assert install.splitlines()[-2].startswith('if "google.colab" in sys.modules and ')
    assert code[0]["outputs"] == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != FIRST])
def test_a_notebook_runs_with_a_graphics_card_as_it_is(name: str) -> None:
    """Nothing but the limit depends on there being one, and the limit is the same."""
    cells = ["".join(cell["source"]) for cell in source(name)["cells"]]
    assert re.search(r"with(?: or|\s+and)\s+without\s+a\s+graphics\s+card", cells[0])
    if name in ON_THE_CPU:
        return
    limits = [cell for cell in cells if "%oomdoctor simulate" in cell]
    assert any('device = "cuda" if torch.cuda.is_available() else "cpu"' in cell for cell in cells)
    (limit,) = limits
    (simulated,) = re.findall(r"else:\n    %oomdoctor simulate (\d+)MiB", limit)
    (capped,) = re.findall(r"set_per_process_memory_fraction\(\((\d+) << 20\)", limit)
    assert simulated == capped
    # cuBLAS allocates its workspaces in PyTorch's memory at the first product: 32 MiB on Hopper, most of such a limit.
    (before,) = [number for number, cell in enumerate(cells) if "CUBLAS_WORKSPACE_CONFIG" in cell]
    assert before <= cells.index(limit)
    assert before < next(number for number, cell in enumerate(cells) if ".to(device)" in cell)
    assert {int(told) for told in re.findall(r"(\d+) MiB", cells[0])} == {int(simulated)}


@pytest.mark.thorough
def test_what_holds_memory_is_found_and_let_go_of(tmp_path: Path) -> None:
    run = execute("02_what_holds_my_memory", tmp_path, f"[stages, len(seen), {CASE}]")
    stages, kept, case = run.asked
    held = {name: sum(roles.values()) for name, roles in stages}
    first, leaking, no_out, no_traceback, as_numbers, healed = held.values()
    assert run.error("fail") == "KeyError"
    report = run.text("report")
    for holder in ("local `widened` of evaluate", "losses[0] → graph", "Out[3] → graph"):
        assert holder in report
    # What each fix says that it freed is what the report then no longer finds; the traceback is of 16 MiB exactly.
    assert sizes(run.text("free-out"))[0] * 2**20 == pytest.approx(leaking - no_out, rel=0.02)
    assert no_out - no_traceback == pytest.approx(16 << 20, rel=0.01)
    assert first < as_numbers + 1 < first * 1.05
    assert leaking > 20 * first
    assert "`losses[…] → graph`, gone" in run.text("grew")
    assert run.error("late") == "OutOfMemoryError"
    assert case["findings"][0]["cause"] == "leak_or_pinned_graph"
    assert (case["outcome"]["kind"], case["outcome"]["fixes"]) == ("healed", ["detach_history(names=seen)"])
    assert "+ seen.append(loss.detach())" in run.text("healed")
    assert kept == 12
    assert healed < first * 1.05
    shows_a_picture(run)


@pytest.mark.thorough
def test_a_plan_says_what_the_cell_then_takes(tmp_path: Path) -> None:
    run = execute(
        "03_plan_before_running", tmp_path, "[forecast, measured, plan, len(losses), 'big' in globals(), most]"
    )
    forecast, measured, plan, steps, built, most = run.asked
    told = run.text("plan")
    assert "on cuda:0 (simulated): ✗ too large" in told
    largest = int(re.search(r"A batch of (\d+) samples fits", told)[1])  # type: ignore[index]
    assert 1 <= largest < 256
    assert "1. Split each batch and accumulate gradients" in told
    assert run.text("not-run") == "0 losses: nothing was run"
    assert steps == 8
    assert plan["fits"] is True
    assert forecast == pytest.approx(measured, rel=plan["forecast"]["error_ratio"])
    assert measured < plan["forecast"]["budget"] == 48 << 20
    big = run.text("big")
    needed = float(re.search(r"It needs ≈ ([0-9.]+) GiB", big)[1])  # type: ignore[index]
    assert 4 * 4.5 < needed < 24  # weights, gradients and Adam's two values of 1.2 billion parameters
    assert re.search(r"T4 16 GB ✗ too large", big)
    assert re.search(r"H100 80 GB ✓ fits", big)
    assert built is False
    assert most < 2 << 30
    shows_a_picture(run)


@pytest.mark.thorough
def test_three_remedies_train_as_they_promise(tmp_path: Path) -> None:
    run = execute("04_training_loops", tmp_path, "[curves, peaks]")
    curves, peaks = run.asked
    for failed in ("train-1", "train-2", "train-3"):
        assert run.error(failed) == "OutOfMemoryError"
    reference = curves.pop("unlimited")
    assert len(reference) == 20
    assert reference[-1] < reference[0] / 10
    away = {name: max(abs(a - b) for a, b in zip(curve, reference, strict=True)) for name, curve in curves.items()}
    assert away["recomputing"] == 0
    assert away["accumulation"] < 1e-5
    assert 1e-6 < away["16 bits"] < 0.05
    assert peaks.keys() == curves.keys()
    assert all(0 < peak < 64 << 20 for peak in peaks.values())
    for name in curves:
        assert f"{name}: 20 steps with" in run.text("keep-1") + run.text("keep-2") + run.text("same")
    shows_a_picture(run)


@pytest.mark.thorough
def test_a_fine_tune_is_healed_in_the_trainer_and_in_a_loop(tmp_path: Path) -> None:
    run = execute("05_transformers", tmp_path, f"[cases, curve, losses, {CASE}]")
    cases, curve, losses, last = run.asked
    assert run.error("train") == "OutOfMemoryError"
    assert "✓ Healed" in run.text("fix")
    assert "✓ Healed" in run.text("healed")
    assert last["outcome"]["kind"] == "healed"
    assert re.search(r"^\+\w", "\n".join(output.text for output in run.cell("diff").outputs), re.MULTILINE)
    assert cases.keys() == {"Trainer", "loop"}
    for unchanged, forecast, measured in cases.values():
        assert measured == pytest.approx(forecast, rel=0.1)
        assert measured < 64 < unchanged
    for one in (curve, losses):
        assert len(one) == 8
        assert one[-1] < 0.9 * one[0]
    shows_a_picture(run)


@pytest.mark.thorough
def test_inference_is_healed_and_generation_planned(tmp_path: Path) -> None:
    run = execute(
        "06_inference_and_generation",
        tmp_path,
        f"[peaks, plan, list(texts.shape), {CASE}, torch.equal(generate(prompts[:8], 32), texts[:8])]",
    )
    peaks, plan, shape, case, same = run.asked
    evaluated, chunked = (re.sub(r"\(.*", "", fix) for fix, _, _ in peaks)
    assert evaluated == "no_grad_eval"
    assert chunked in {"chunked_inference", "chunked_forward"}  # equally good: whose dry run ends first
    for _, unchanged, measured in peaks:
        assert measured < 48 << 20 < unchanged
    away = float(re.search(r"at most (\S+) from small batches", run.text("second"))[1])  # type: ignore[index]
    assert away < 1e-5
    assert run.error("generate") == "OutOfMemoryError"
    assert "cache[…]" in run.text("generate")
    assert case["outcome"]["kind"] == "offered"
    assert case["unchanged"]["peak"] > 48 << 20 > plan["forecast"]["peak"]
    assert plan["fits"] is True
    assert shape == [512, 40]
    assert same
    shows_a_picture(run)


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit on data is Linux's")
def test_host_memory_is_told_apart(tmp_path: Path) -> None:
    run = execute(
        "07_host_memory",
        tmp_path,
        f"[{CASE}, means, isinstance(features, np.memmap), alone, resource.getrlimit(resource.RLIMIT_DATA) == limits]",
    )
    case, means, mapped, alone, unlimited = run.asked
    assert run.error("read") == "MemoryError"
    assert case["findings"][0]["rule"] == "array_larger_than_memory"
    assert (case["outcome"]["kind"], case["fixes"][0]["id"]) == ("healed", "memmap_array")
    assert 'np.load(path, mmap_mode="r")' in run.text("diff")
    assert len(means) == 16
    assert all(abs(mean) < 0.01 for mean in means)
    assert mapped
    assert unlimited
    assert re.search(
        r"page cache.*(so that part is not|is too little to be) the cause", run.text("cached"), re.I | re.S
    )
    nothing, as_list, as_array = (min(alone[name]) for name in ("nothing", "list", "array"))
    assert as_list > nothing + 15
    assert as_array < nothing + 8
    shows_a_picture(run)


@pytest.mark.thorough
def test_a_rule_of_ones_own_fires(tmp_path: Path) -> None:
    run = execute("08_your_own_rule", tmp_path, "[case, len(losses), folder.exists()]")
    case, steps, left = run.asked
    assert re.search(r"contrastive_batch\.yaml:\d+.*'activation_rato'", run.text("faulty"))
    assert run.text("mended") == "1 rule, no faults"
    assert run.error("train") == "OutOfMemoryError"
    assert case["findings"][0]["rule"] == "contrastive_batch"
    assert "The contrastive loss needs its whole batch (confidence 99 %)" in run.text("train")
    assert case["outcome"]["kind"] == "healed"
    (fix,) = case["outcome"]["fixes"]
    assert fix.startswith("checkpoint_blocks(")
    assert steps == 2
    assert "wrote oomdoctor/fixes/gather_in_parts.py" in run.text("scaffold")
    assert "FIX: Final = Fix(" in run.text("scaffold")
    (page,) = run.data("train", "text/html")[:1]
    assert "The contrastive loss needs its whole batch" in page
    assert left is False
    checkout = NOTEBOOKS.parent
    assert not (checkout / "oomdoctor" / "fixes" / "gather_in_parts.py").exists()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # of ipyparallel itself, at its end
def test_ranks_are_healed_together(tmp_path: Path) -> None:
    run = execute("09_several_ranks", tmp_path, "told")
    assert run.asked == [[True, True]] * 2
    assert run.text("ranks").count("The fullest rank holds 5.6") == 2
    assert run.text("train").count("✓ Healed: In[5] ran to its end with 1 change in place") == 2
    assert run.text("equal").count("the same weights and losses: True; the model is the object that it was: True") == 2
    assert "rank 1: silent for 8 s: killed, or stopped" in run.text("down")
    # What runs for comparison is what the diff says.
    shown = (output.get("text") or output.data["text/plain"] for output in run.cell("diff").outputs)
    lines = "".join(shown).splitlines()
    changed = [line[1:] for line in lines if line[:1] in ("+", " ") and line[:2] != "++"]
    assert run.cell("fresh").source.splitlines()[1:] == changed
