"""``oomdoctor run`` on scripts that write files: what was not reached is no reason to give up, what was is told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(6000, 64), torch.randn(6000, 1)

def save(steps):
    with open("saved", "a") as file:
        file.write(f"{steps} ")

def main():
    for at in (0, 3000):
        BEFORE
        loss = nn.functional.mse_loss(model(x[at : at + 3000]), y[at : at + 3000])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        EACH
    save(at)

if __name__ == "__main__":
    main()
"""


def run(tmp_path: Path, each: str, *options: str, before: str = "pass") -> tuple[subprocess.CompletedProcess[str], str]:
    (tmp_path / "train.py").write_text(SCRIPT.replace("EACH", each).replace("BEFORE", before), encoding="utf-8")
    command = [sys.executable, "-m", "oomdoctor", "run", "--simulate", "40MiB", *options, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=tmp_path)
    saved = tmp_path / "saved"
    return done, saved.read_text() if saved.exists() else ""


def test_what_is_saved_in_the_end_is_saved_once(tmp_path: Path) -> None:
    done, saved = run(tmp_path, "pass")
    assert done.returncode == 0, done.stderr
    assert "Healed: train.py" in done.stderr
    assert re.search(r"State +clean", done.stderr)
    assert saved == "3000 "


def test_what_the_first_round_had_not_come_to_is_saved_once(tmp_path: Path) -> None:
    done, saved = run(tmp_path, "n = at; save(at)")
    assert done.returncode == 0, done.stderr
    assert re.search(r"State +clean", done.stderr)
    assert saved == "0 3000 3000 "


def test_what_may_have_been_saved_is_told_with_the_diagnosis_and_a_way_on(tmp_path: Path) -> None:
    done, saved = run(tmp_path, "pass", before="save(at)")
    assert done.returncode == 1
    assert saved == "0 "
    assert "What holds it" in done.stderr
    assert "Not retried: train.py was left as it failed" in done.stderr
    assert "cannot be undone" in done.stderr
    assert "`oomdoctor run --anyway train.py`" in done.stderr
    (tmp_path / "saved").unlink()
    done, saved = run(tmp_path, "pass", "--anyway", before="save(at)")
    assert done.returncode == 0, done.stderr
    assert saved == "0 0 3000 3000 "
    assert re.search(r"State +unverified", done.stderr)
