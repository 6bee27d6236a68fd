"""``oomdoctor explain`` of a CUDA memory snapshot."""

import json
import os
import pickle
import subprocess
import sys

import pytest

from oomdoctor.cli import main

MIB = 1 << 20
TORCH = "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py"
LIBRARY = "/opt/venv/lib/python3.12/site-packages/transformers/models/llama/modeling_llama.py"
NATIVE = {"filename": "??", "line": 0, "name": "at::native::empty_cuda"}


def frame(path, line, name):
    return {"filename": path, "line": line, "name": name}


FORWARD = [
    NATIVE,
    frame(TORCH, 125, "forward"),
    frame("/home/me/net.py", 12, "forward"),
    frame("/home/me/train.py", 40, "step"),
]
LLAMA = [
    NATIVE,
    frame(TORCH, 125, "forward"),
    frame(LIBRARY, 240, "forward"),
    frame("/tmp/ipykernel_7/81.py", 3, "step"),
]
MODEL = [frame(TORCH, 90, "__init__"), frame("/home/me/train.py", 8, "<module>")]


def event(action, address=0, size=0, frames=(), **more):
    return {"action": action, "addr": address, "size": size * MIB, "stream": 0, "frames": list(frames), **more}


def block(size, state="active_allocated", **more):
    return {"size": size * MIB, "requested_size": size * MIB, "state": state, **more}


def snapshot(events, *blocks, device=0):
    """Return a snapshot of one segment of 100 MiB at address 0, whose blocks lie one behind the other."""
    segment = {"device": device, "address": 0, "total_size": 100 * MIB, "segment_type": "large", "blocks": list(blocks)}
    return {"segments": [segment], "device_traces": [[] for _ in range(device)] + [events]}


MODEL_BLOCK = block(10, address=0, frames=MODEL)
REST = block(90, "inactive", address=10 * MIB, frames=[])
STEP = [
    event("segment_alloc", 0, 100),
    event("alloc", 0, 10, MODEL),
    event("alloc", 10 * MIB, 30, FORWARD),
    event("alloc", 40 * MIB, 20, FORWARD),
    event("alloc", 60 * MIB, 5, [NATIVE]),
    event("free_requested", 10 * MIB, 30),
    event("free_completed", 10 * MIB, 30),
    event("alloc", 10 * MIB, 15, LLAMA),
    event("free_completed", 10 * MIB, 15),
    event("free_completed", 40 * MIB, 20),
    event("free_completed", 60 * MIB, 5),
]


@pytest.fixture
def explain(tmp_path, capsys):
    """Return what is printed of some object that was pickled."""

    def tell(found, *options):
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(pickle.dumps(found))
        assert main(["explain", *options, str(path)]) == 0
        return capsys.readouterr().out

    return tell


def holders(explain, found):
    (peak,) = json.loads(explain(found, "--json"))["peaks"]
    told = [(one["size"] // MIB, one["count"], (one["caller"] or {}).get("line")) for one in peak["holders"]]
    return peak["moment"], peak["allocated"] // MIB, told


def test_the_peak_is_found_and_told_by_the_innermost_line_of_the_user(explain):
    assert holders(explain, snapshot(STEP, MODEL_BLOCK, REST)) == ("peak", 65, [(50, 2, 12), (10, 1, 8), (5, 1, None)])
    out = explain(snapshot(STEP, MODEL_BLOCK, REST))
    assert out.startswith("At the peak, tensors held 65.0 MiB of cuda:0.\n  reserved 100 MiB, 11 events recorded\n")
    assert "  50.0 MiB in 2 blocks: `home/me/net.py:12` in `forward`\n" in out
    assert "  5.00 MiB in 1 block: no line of Python" in out


def test_a_refusal_goes_before_the_peak(explain):
    events = [*STEP[:8], event("oom", 64 * MIB, 70, FORWARD, device_free=32 * MIB), *STEP[8:]]
    found = snapshot(events, MODEL_BLOCK, REST)
    assert holders(explain, found) == ("refused", 50, [(20, 1, 12), (15, 1, 3), (10, 1, 8), (5, 1, None)])
    out = explain(found)
    assert " ".join(out.split()).startswith(
        "When memory ran out, tensors held 50.0 MiB of cuda:0; 70.0 MiB more were asked for, and 32.0 MiB were free."
    )
    assert "`tmp/ipykernel_7/81.py:3` in `step`, mostly through" in " ".join(out.split())
    assert "`models/llama/modeling_llama.py:240` in `forward`" in " ".join(out.split())


def test_what_was_allocated_before_the_recording_counts_without_a_line(explain):
    events = STEP[6:7] + STEP[2:3]  # 30 MiB of unknown origin go, and others come to the same address
    found = snapshot(events, MODEL_BLOCK, block(30, address=10 * MIB, frames=FORWARD))
    assert holders(explain, found) == ("peak", 40, [(30, 1, 12), (10, 1, 8)])
    events = [*STEP[6:7], event("alloc", 10 * MIB, 5, FORWARD)]
    found = snapshot(events, MODEL_BLOCK, block(5, address=10 * MIB, frames=FORWARD))
    assert holders(explain, found) == ("peak", 40, [(30, 1, None), (10, 1, 8)])
    assert "30.0 MiB in 1 block: allocated before the recording began" in explain(found)


def test_without_a_history_the_end_is_told_and_how_to_record_one(explain):
    old = {**block(20), "history": [{"addr": 10 * MIB, "real_size": 19 * MIB, "frames": FORWARD}]}
    del old["requested_size"]
    found = snapshot([], block(10), old, block(70, "inactive"))
    assert holders(explain, found) == ("end", 29, [(19, 1, 12), (10, 1, None)])
    assert "torch.cuda.memory._record_memory_history()" in explain(found)
    assert explain(found["segments"]) == explain(found)


def test_of_several_devices_the_fullest_comes_first(explain):
    small, large = snapshot(STEP[:2], MODEL_BLOCK, REST), snapshot(STEP, MODEL_BLOCK, REST, device=1)
    both = {
        "segments": small["segments"] + large["segments"],
        "device_traces": small["device_traces"] + large["device_traces"][1:],
    }
    out = explain(both)
    assert out.index("of cuda:1") < out.index("of cuda:0")
    assert "no CUDA memory in use" in explain({"segments": [], "device_traces": [[], []]})


class Loaded:
    def __reduce__(self):
        return os.mkdir, ("was-run",)


@pytest.mark.parametrize(
    "found",
    [Loaded(), {"segments": Loaded()}, {"epoch": 3}, [1, 2], 5, {"segments": [{"device": 0}]}, {"segments": None}],
)
def test_another_pickle_is_refused_and_none_is_run(found, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps(found))
    assert main(["explain", str(path)]) == 2
    assert "model.pickle is no CUDA memory snapshot" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("cut", [1, 2, 3, 10, 40])
def test_what_is_cut_off_is_refused(cut, tmp_path, capsys):
    path = tmp_path / "cut.pickle"
    whole = pickle.dumps(snapshot(STEP, MODEL_BLOCK, REST))
    path.write_bytes(whole[: len(whole) // 2 - cut])
    assert main(["explain", str(path)]) == 2
    assert "cut.pickle is no CUDA memory snapshot" in " ".join(capsys.readouterr().err.split())


def test_no_torch_is_loaded(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot(STEP, MODEL_BLOCK, REST)))
    code = (
        f"import sys\nfrom oomdoctor.cli import main\nmain(['explain', {str(path)!r}])\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.gpu
def test_the_peak_of_a_real_one_is_the_allocators_own(tmp_path, capsys):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history()
    kept = torch.empty(8 * MIB, device="cuda")
    del kept
    rest = torch.empty(2 * MIB, device="cuda")
    path = tmp_path / "real.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)
    assert main(["explain", "--json", str(path)]) == 0
    peak = json.loads(capsys.readouterr().out)["peaks"][0]
    assert abs(peak["allocated"] - torch.cuda.max_memory_allocated()) < MIB
    assert peak["holders"][0]["caller"]["path"] == __file__
    assert rest.is_cuda
