"""Forecasts are kept beside what was measured, and the error that is told comes from them."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from forecast_lab import forecast, nothing
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from oomdoctor.allocator import virtual
from oomdoctor.forecast import calibration
from oomdoctor.forecast.calibration import Calibration, Row
from oomdoctor.model.absence import Unavailable
from oomdoctor.model.session import Cell, Cells

ROOT = Path(__file__).parents[2]
TERMS = {"basis": "shadow run", "models": "a", "torch": "2.13.0", "device": "virtual"}


def row(error=0.0, **terms):
    return Row(forecast=10_000, measured=round(10_000 * (1 + error)), **TERMS | terms)


def test_rows_come_back_as_they_were_in_their_order(tmp_path):
    given = tuple(row(index / 100) for index in range(5))
    assert [calibration.keep(one, tmp_path) for one in given] == [None] * 5
    assert calibration.rows(tmp_path) == given


def test_nothing_is_kept_at_first(tmp_path):
    assert calibration.rows(tmp_path / "nowhere") == ()
    assert calibration.summary(()) == "0"


def test_only_numbers_hashes_and_versions_are_written(tmp_path):
    calibration.keep(row(models=calibration.hash_of(["SecretNet", "Linear"])), tmp_path)
    text = (tmp_path / "forecasts.jsonl").read_text()
    assert "Secret" not in text
    assert set(json.loads(text)) == {"forecast", "measured", "basis", "models", "torch", "device"}


def test_the_hash_does_not_depend_on_order_and_tells_models_apart():
    assert calibration.hash_of(["A", "B", "A"]) == calibration.hash_of(["B", "A"]) != calibration.hash_of(["A"])


def test_the_file_is_cut_to_the_newest_rows(tmp_path):
    line = json.dumps({"forecast": 1, "measured": 1, **TERMS}) + "\n"
    (tmp_path / "forecasts.jsonl").write_text(line * 1200)
    calibration.keep(row(0.5), tmp_path)
    kept = calibration.rows(tmp_path)
    assert len(kept) == 1000
    assert kept[-1] == row(0.5)
    assert {path.name for path in tmp_path.iterdir()} == {"forecasts.jsonl", "forecasts.jsonl.lock"}


DAMAGE = {
    "cut off": b'{"forecast": 10, "meas',
    "no text": bytes(range(128, 256)),
    "another form": b'{"forecast": 10}\n[1, 2]\n"x"\nnull\n7\n',
    "odd values": b'{"forecast": -1, "measured": 2, "basis": "", "models": "", "torch": "", "device": ""}\n',
    "no number": b'{"forecast": NaN, "measured": 2, "basis": "", "models": "", "torch": "", "device": ""}\n',
    "empty lines": b"\n\n\n",
    "nested": b"[" * 100_000 + b"\n",
    "zeros": b"\0" * 4096,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_survived(tmp_path, name):
    calibration.keep(row(0.1), tmp_path)
    path = tmp_path / "forecasts.jsonl"
    path.write_bytes(path.read_bytes() + DAMAGE[name])
    assert calibration.keep(row(0.2), tmp_path) is None
    assert calibration.rows(tmp_path) == (row(0.1), row(0.2))


def test_a_huge_file_is_read_at_its_end_and_made_small_again(tmp_path):
    path = tmp_path / "forecasts.jsonl"
    path.write_bytes(b"x" * (3 << 20) + b"\n")
    calibration.keep(row(0.1), tmp_path)
    assert calibration.rows(tmp_path) == (row(0.1),)
    assert path.stat().st_size < 1000


def test_where_nothing_can_be_written_the_reason_is_told(tmp_path):
    (tmp_path / "file").touch()
    kept = calibration.keep(row(), tmp_path / "file")
    assert isinstance(kept, Unavailable)
    assert "could not be kept" in kept.reason
    assert isinstance(calibration.rows(tmp_path / "file"), Unavailable)


WRITER = """
import sys
from pathlib import Path
from oomdoctor.forecast.calibration import Row, keep
for index in range(150):
    row = Row(forecast=int(sys.argv[2]) + 1, measured=index + 1, basis="b", models="m", torch="t", device="d")
    assert keep(row, Path(sys.argv[1])) is None
"""


def test_two_processes_at_once_lose_nothing_and_tear_nothing(tmp_path):
    line = json.dumps({"forecast": 9, "measured": 9, **TERMS}) + "\n"
    (tmp_path / "forecasts.jsonl").write_text(line * 1050)  # both meet the moment at which it is cut
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, str(n)], cwd=ROOT) for n in range(2)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    kept = calibration.rows(tmp_path)
    for number in range(2):
        assert [one.measured for one in kept if one.forecast == number + 1] == list(range(1, 151))


def test_the_cache_folder_is_that_of_the_system(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/someone"))
    own = Path("/home/someone/.cache/oomdoctor")
    for told, expected in ((str(tmp_path), tmp_path / "oomdoctor"), ("not/absolute", own), ("", own)):
        monkeypatch.setenv("XDG_CACHE_HOME", told)
        assert calibration.cache_folder() == expected
    monkeypatch.setattr(sys, "platform", "darwin")
    assert calibration.cache_folder() == Path("/home/someone/Library/Caches/oomdoctor")


def test_the_error_is_told_from_twenty_rows_on_and_covers_nineteen_of_twenty():
    errors = [index / 1000 for index in range(1, 101)]
    assert calibration.calibration(map(row, errors[:19]), **TERMS) == Calibration(rows=19)
    assert calibration.calibration(map(row, errors[:20]), **TERMS).error_ratio == pytest.approx(0.020)
    assert calibration.calibration(map(row, errors), **TERMS).error_ratio == pytest.approx(0.096)
    assert math.ceil(0.95 * 101) == 96


def test_too_high_counts_as_much_as_too_low():
    found = calibration.calibration([row(-0.3)] * 20, **TERMS)
    assert found.error_ratio == pytest.approx(0.3)


def test_rows_of_another_kind_do_not_count_and_those_of_the_same_models_come_first():
    others = [row(0.5, device="cuda"), row(0.5, torch="2.4.0"), row(0.5, basis="analytic")] * 20
    assert calibration.calibration(others, **TERMS) == Calibration()
    mixed = [*others, *[row(0.1, models="b")] * 40, *[row(0.03)] * 20]
    assert calibration.calibration(mixed, **TERMS) == Calibration(rows=20, error_ratio=pytest.approx(0.03))
    few = [*[row(0.1, models="b")] * 40, *[row(0.03)] * 19]
    assert calibration.calibration(few, **TERMS) == Calibration(rows=59, error_ratio=pytest.approx(0.1))


def test_the_error_only_widens_what_the_benchmarks_found():
    assert Calibration(rows=5).widened(0.02) == 0.02
    assert Calibration(rows=50, error_ratio=0.001).widened(0.02) == 0.02
    assert Calibration(rows=50, error_ratio=0.08).widened(0.02) == 0.08


def test_what_is_told_of_the_rows():
    assert calibration.summary((row(),) * 7) == "7 (their error is told from 20 on)"
    assert calibration.summary((row(0.031),) * 30) == "30, 95% of them at most 3.1% off"
    assert calibration.summary(Unavailable("because")) == "because"


def test_a_forecast_tells_the_error_that_is_applied():
    ns = {"x": 1}
    plain = forecast(ns, "x = 2", prepare=nothing)
    with calibration.applied(Calibration(rows=50, error_ratio=0.25)):
        widened = forecast(ns, "x = 2", prepare=nothing)
    assert plain.error_ratio < 0.1
    assert widened.error_ratio == 0.25


HEALED = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, labels = torch.randn(4096, 64), torch.randint(0, 8, (4096,))
"""
TRAINED = """
for x, y in zip(data.split(4096), labels.split(4096)):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def shell():
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    shell.run_cell("%load_ext oomdoctor\n%config OomDoctor.auto = 'exact'")
    yield shell
    shell.run_cell("%unload_ext oomdoctor")
    shell.reset()
    InteractiveShell.clear_instance()


def _said(shell, cell):
    with capture_output() as shown:
        shell.run_cell(cell, store_history=True)
    return shown.stdout


@pytest.mark.parametrize("keeps", [True, False])
def test_a_healed_cell_is_kept_unless_that_is_switched_off(shell, monkeypatch, tmp_path, keeps):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _said(shell, HEALED)
    _said(shell, f"%config OomDoctor.keep_forecasts = {keeps}")
    _said(shell, "%oomdoctor simulate 5MiB")
    _said(shell, TRAINED)
    status = _said(shell, "%oomdoctor status")
    case = sys.modules["oomdoctor.pipeline"].last_case()
    assert case.outcome.kind == "healed", case.outcome
    kept = calibration.rows()
    if not keeps:
        assert kept == ()
        assert "forecasts kept: off" in status
        return
    (found,) = kept
    made = next(one for one in case.plan.candidates if one.label in case.outcome.fixes)
    assert (found.forecast, found.measured) == (made.forecast.peak, case.outcome.peak)
    assert found.device == "virtual"
    assert found.error_ratio < 0.1
    assert "forecasts kept: 1 (their error is told from 20 on)" in status


@pytest.mark.parametrize("keeps", [True, False])
def test_a_cell_that_is_planned_tells_the_error_of_those_that_were_healed(shell, monkeypatch, tmp_path, keeps):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _said(shell, HEALED)
    _said(shell, "%oomdoctor simulate 500MiB")
    _said(shell, f"%config OomDoctor.keep_forecasts = {keeps}")
    pipeline = sys.modules["oomdoctor.pipeline"]
    cells = Cells(history=(Cell(number=1, source=TRAINED),))
    terms = pipeline.pricing.terms_of(pipeline.open_session(shell.user_ns, cells, virtual.active(), shell))
    for _ in range(30):
        calibration.keep(calibration.Row(forecast=100, measured=117, **terms))
    _said(shell, f"%%memplan --json {tmp_path / 'plan.json'}\n{TRAINED}")
    found = json.loads((tmp_path / "plan.json").read_text())["forecast"]["error_ratio"]
    assert found == pytest.approx(0.17) if keeps else found < 0.1
