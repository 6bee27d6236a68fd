from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oomdoctor.cli import main

OOM = (
    "RuntimeError: CUDA out of memory. Tried to allocate 600.00 MiB (GPU 0; 7.50 GiB total capacity; 5.25 GiB already "
    "allocated; 100.00 MiB free; 7.00 GiB reserved in total by PyTorch)\n"
)


def command(*arguments, text=""):
    return subprocess.run(
        [sys.executable, "-m", "oomdoctor", *arguments], input=text, capture_output=True, text=True, check=False
    )


@pytest.fixture
def log(tmp_path):
    def write(text):
        path = tmp_path / "run.log"
        path.write_text(text)
        return str(path)

    return write


def test_explain_says_what_failed_and_why(log, capsys):
    assert main(["explain", log(OOM)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("The program asked for 600 MiB, 500 MiB more than was free of the 7.50 GiB of cuda:0.")
    assert "requested 600 MiB, total 7.50 GiB, free 100 MiB, allocated 5.25 GiB, reserved 7.00 GiB" in out
    assert "The pool is fragmented" in out


def test_explain_as_json_has_the_shape_of_schema_1(log, capsys):
    assert main(["explain", "--json", log(OOM + "KeyboardInterrupt\n")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["schema", "incident", "findings", "others"]
    assert told["schema"] == 1
    assert (told["incident"]["family"], told["incident"]["requested"]) == ("cuda_oom", 600 << 20)
    assert told["findings"][0]["rule"] == "fragmentation"
    assert [other["format"] for other in told["others"]] == ["interrupt"]


def test_explain_of_something_else_says_what_it_is_and_fails(log, capsys):
    assert main(["explain", log("RuntimeError: CUDA error: an illegal memory access was encountered")]) == 1
    out = capsys.readouterr().out
    assert " ".join(out.split()).startswith(
        "The program failed with RuntimeError, not for lack of memory. A kernel read or wrote outside of its memory"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explain", "/no/such/file"], "cannot read /no/such/file"),
        (["explain", "/"], "cannot read /"),
        (["rules", "show", "nothing"], "there is no rule 'nothing'"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(arguments, words, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["rules"], ["explain", "--no-such"]])
def test_a_command_that_is_none_is_bad_usage(arguments, capsys):
    assert main(arguments) == 2
    capsys.readouterr()


def test_text_is_read_from_a_pipe_and_no_torch_is_imported():
    code = (
        "import sys\nfrom oomdoctor.cli import main\nstatus = main(['explain'])\n"
        "print('torch' in sys.modules, 'ipywidgets' in sys.modules, file=sys.stderr)\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=OOM, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "False False\n")
    assert done.stdout.startswith("The program asked for 600 MiB")


def test_nothing_to_read_is_bad_usage():
    done = command("explain", text=" \n")
    assert done.returncode == 2
    assert "there is no text" in done.stderr


def test_a_log_that_is_no_unicode_is_read(tmp_path, capsys):
    path = tmp_path / "x.log"
    path.write_bytes(b"\xff\xfe\x80" + OOM.encode())
    assert main(["explain", str(path)]) == 0
    capsys.readouterr()


def test_there_is_no_colour_where_there_is_no_terminal(log):
    assert "\x1b" not in command("explain", log(OOM)).stdout


def test_rules_are_listed_and_shown(capsys):
    assert main(["rules", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"fragmentation", "activations_dominate"} <= {rule["id"] for rule in listed["rules"]}
    assert main(["rules", "show", "fragmentation"]) == 0
    assert "May be wrong" in capsys.readouterr().out
    assert main(["rules", "show", "fragmentation", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cause"] == "fragmentation"


def test_rules_check_tells_each_fault_with_its_place(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("id: mine\nmatch: incident.nope > 1\n")
    assert main(["rules", "check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert f"{tmp_path / 'mine.yaml'}:2: match.0: the expression is refused: unknown attribute: 'nope'" in out
    assert main(["rules", "check", "--json", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["faults"][0]["line"] == 1


def test_env_names_the_versions_and_the_limits(capsys):
    assert main(["env", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["packages"]["torch"]
    assert told["host"]["total"] > 0


def test_a_reader_that_leaves_early_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m oomdoctor rules list | true", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


def test_without_room_for_the_answer_one_line_says_so(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("CUDA out of memory. Tried to allocate 2.00 GiB")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "oomdoctor", "explain", str(log)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr == "oomdoctor explain: [Errno 28] No space left on device\n"


def test_what_the_locale_cannot_write_is_left_open() -> None:
    """As in a container without a locale: a rule with an arrow in its text."""
    settings = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    show = [sys.executable, "-m", "oomdoctor", "rules", "show", "closure_holds_tensors"]
    whole = command("rules", "show", "closure_holds_tensors").stdout
    assert not whole.isascii()
    done = subprocess.run(show, capture_output=True, encoding="ascii", env=settings, check=True)
    assert done.stdout == whole.replace("→", "?")
