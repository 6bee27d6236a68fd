"""``oomdoctor run``: a script runs as with Python, and one that runs out of memory is healed."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TRAINS = """
    import sys
    import torch
    from torch import nn

    def train(model, optimizer, steps):
        for step in range(steps):
            x, y = torch.randn(512, 256), torch.randn(512, 256)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            print("step", step)

    if __name__ == "__main__":
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)])
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, int(sys.argv[1]))
        print("sum", sum(parameter.double().sum().item() for parameter in model.parameters()))
        sys.exit(3)
"""
POOL = """
import multiprocessing as mp

def f(n):
    return n + 1

if __name__ == "__main__":
    with mp.get_context("spawn").Pool(1) as pool:
        print(pool.map(f, [1, 2]))
"""


def run(tmp_path: Path, source: str, *words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source), encoding="utf-8")
    command = [sys.executable, "-m", "oomdoctor", "run", *options, str(script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=tmp_path)


def plainly(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(tmp_path / "script.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)


def test_a_script_that_runs_out_is_healed_and_ends_as_itself(tmp_path: Path) -> None:
    diff = tmp_path / "healed.diff"
    done = run(tmp_path, TRAINS, "3", options=("--simulate", "80MiB", "--diff", str(diff), "--json", "case.json"))
    case = json.loads((tmp_path / "case.json").read_text())
    assert (case["outcome"]["kind"], case["incident"]["is_oom"]) == ("healed", True)
    assert done.returncode == 3, done.stderr
    assert "Healed: script.py ran to its end" in done.stderr
    assert "%oomdoctor" not in done.stderr
    assert "Traceback" not in done.stderr
    plain = plainly(tmp_path, "3")
    healed = done.stdout.splitlines()[-4:]
    assert healed[:3] == plain.stdout.splitlines()[:3] == ["step 0", "step 1", "step 2"]
    sums = [float(lines[-1].removeprefix("sum ")) for lines in (healed, plain.stdout.splitlines())]
    assert sums[0] == pytest.approx(sums[1], rel=1e-4)
    subprocess.run(["patch", "-p0", "script.py", str(diff)], check=True, cwd=tmp_path, capture_output=True)
    assert plainly(tmp_path, "3").stdout.splitlines()[-1].removeprefix("sum ") == f"{sums[0]!r}"


def test_without_a_retry_the_traceback_is_that_of_python(tmp_path: Path) -> None:
    done = run(tmp_path, TRAINS, "3", options=("--simulate", "80MiB", "--auto", "off"))
    assert done.returncode == 1
    line = 1 + textwrap.dedent(TRAINS).splitlines().index("    train(model, optimizer, int(sys.argv[1]))")
    first = f'Traceback (most recent call last):\n  File "{tmp_path}/script.py", line {line}, in <module>\n'
    assert done.stderr.startswith(first)
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stderr
    assert "What holds it" in done.stderr
    assert f"(script.py, line {line})" in done.stderr
    assert "%oomdoctor" not in done.stderr, "nobody can type that into a script"
    assert "In[1]" not in done.stderr


@pytest.mark.parametrize(
    "source",
    [
        "import sys; print(sys.argv[1:], __name__, __file__)",
        "import sys; print('out'); print('err', file=sys.stderr); sys.exit('why')",
        "import sys; sys.exit()",
        "raise SystemExit(7)",
        "1 + 1\n'a value that nobody shows'",
        "def f():\n    return 1 / 0\nf()",
        "raise KeyError('x') from ValueError('y')",
        "x = (1,\n",
        "return 3\n",
        "print('\u00e9\u4e16')",
        "# coding: latin-1\nprint('plain')",
        "x = 3\ndef f():\n    global x\n    x += 1\nf()\nprint(x)",
        "from __future__ import annotations\ndef f(x: NotThere): ...\nprint(f.__annotations__)",
        "import pickle\nclass A: ...\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)",
        "import inspect\ndef f():\n    return 2\nprint(inspect.getsource(f))",
        "import helper_beside",
        "text = '''\n%timeit\n!ls\n?help\n'''\nprint(text)",
        "import atexit; atexit.register(print, 'at the end')",
        POOL,
        "import warnings; warnings.warn('careful'); print(len(warnings.filters) > 0)",
    ],
)
def test_a_script_does_what_it_does_under_python(tmp_path: Path, source: str) -> None:
    done, plain = run(tmp_path, source, "a", "-b", "--json"), plainly(tmp_path, "a", "-b", "--json")
    assert done.returncode == plain.returncode
    assert done.stdout == plain.stdout
    assert done.stderr == plain.stderr


@pytest.mark.parametrize("name", ["missing.py", ".", "binary.py"])
def test_what_is_no_script_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00 = 1")
    command = [sys.executable, "-m", "oomdoctor", "run", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "is not a Python script that can be read" in done.stderr


@pytest.mark.parametrize("option", ["--diff", "--json"])
def test_where_nothing_can_be_written_the_script_does_not_run(tmp_path: Path, option: str) -> None:
    done = run(tmp_path, "print(1)", options=(option, "no/such/folder"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("oomdoctor run: no/such/folder cannot be written: it takes a file in a folder that exists\n")


def test_without_a_failure_the_json_is_null(tmp_path: Path) -> None:
    assert run(tmp_path, "print(1)", options=("--json", "case.json")).stdout == "1\n"
    assert (tmp_path / "case.json").read_text() == "null\n"


def test_each_rank_writes_its_own_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert run(tmp_path, "print(1)", options=("--json", "case.json")).returncode == 0
    assert sorted(path.name for path in tmp_path.glob("case*")) == ["case.rank0.json", "case.rank1.json"]


def test_nothing_is_written_beside_the_script(tmp_path: Path) -> None:
    run(tmp_path, "print(1)")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]
