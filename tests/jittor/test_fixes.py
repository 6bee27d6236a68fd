"""The fixes on real programs: the same weights, and a graph that is let go of."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

from jittor_programs import ACCUMULATES, EVALUATES, HOST, MEMORY, SETUP, TRAINS, cells, evidence

from oomdoctor import fixes
from oomdoctor.model.fix import Patch
from oomdoctor.model.unavailable import Refused

MEASURES = """
import json
import numpy as np
jt.sync_all()
def told():
    names = [*model.parameters(), *(one for group in optimizer.param_groups for one in group["values"])]
    return [one.numpy().tolist() for one in names]
peak = 0
def noted(step):
    def called(*args):
        global peak
        made = step(*args)
        peak = max(peak, jt.liveness_info()["lived_ops"])
        return made
    return called
optimizer.backward = noted(optimizer.backward)
"""
TELLS = """
print("> " + json.dumps({"peak": peak, "weights": told(), "right": globals().get("right")}))
"""


def run(*sources: str) -> dict[str, Any]:
    text = "\n".join((sources[0], MEASURES, *sources[1:], TELLS))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("> ")]
    return json.loads(line.removeprefix("> "))


def patched(fix_id: str, source: str) -> str:
    fix, found = fixes.get(fix_id), evidence(SETUP, source, memory=replace(MEMORY, operators=1))
    proposals = fix.propose(HOST, found)
    assert not isinstance(proposals, Refused)
    change = fix.patch(cells(SETUP, source), found, proposals[0].dose)
    assert isinstance(change, Patch)
    return change.edits[0].after


def furthest(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Return the largest difference of two runs' weights and state, as a share of the largest of them."""
    import numpy as np

    pairs = [(np.array(one), np.array(other)) for one, other in zip(before["weights"], after["weights"], strict=True)]
    return max(float(abs(one - other).max()) for one, other in pairs) / max(float(abs(one).max()) for one, _ in pairs)


def test_an_accumulation_that_is_computed_part_by_part_keeps_no_graph_and_leaves_equal_weights() -> None:
    before, after = run(SETUP, ACCUMULATES), run(SETUP, patched("jittor_sync", ACCUMULATES))
    assert after["weights"] == before["weights"]
    assert after["peak"] <= before["peak"] / 4


def test_steps_in_parts_are_those_of_the_whole_batch_up_to_rounding() -> None:
    before, after = run(SETUP, TRAINS), run(SETUP, patched("micro_batch", TRAINS))
    tolerance = fixes.get("micro_batch").tolerance
    assert tolerance is not None
    assert furthest(before, after) <= tolerance


def test_evaluation_without_gradients_keeps_the_values() -> None:
    before, after = run(SETUP, EVALUATES), run(SETUP, patched("no_grad_eval", EVALUATES))
    assert after["weights"] == before["weights"]
    assert after["right"] == before["right"]


def test_evaluation_that_keeps_its_outputs_keeps_no_graph_of_them() -> None:
    keeps = "model.eval()\nouts = [model(xs) for xs, _ in batches]\npeak = 0\njt.sync_all()\n"
    counts = "peak = jt.liveness_info()['lived_ops']\n"
    before = run(SETUP, keeps + counts)
    after = run(SETUP, "with jt.no_grad():\n    outs = [model(xs) for xs, _ in batches]\njt.sync_all()\n" + counts)
    assert after["peak"] < before["peak"]


def test_the_pools_give_back_what_they_keep() -> None:
    kept = "big = jt.rand((64, 1024, 1024))\nbig.sync()\ndel big\n"
    reads = "from oomdoctor.objects import jittor as lazy\npeak = lazy.memory(tuple).pool_unused\n"
    before, after = run(SETUP, kept + reads), run(SETUP, kept + patched("jittor_release", reads))
    assert before["peak"] >= 256 << 20
    assert after["peak"] < 32 << 20


def test_sixteen_bits_change_results_and_no_weight_is_kept_in_them() -> None:
    before, after = run(SETUP, TRAINS), run(SETUP, patched("jittor_amp", TRAINS))
    assert after["weights"] != before["weights"]
    assert furthest(before, after) < 0.05
