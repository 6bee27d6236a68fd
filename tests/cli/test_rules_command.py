from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from oomdoctor.cli import main
from oomdoctor.rulebook import locate
from oomdoctor.rulebook.loading import files_in

RULE = """\
id: mine
since: 0.1.0
title: One of mine
what: What it looks at.
why: Why.
match: incident.requested > incident.free
confidence: 0.5
cause: unknown
because: ["{incident.requested:size} did not fit."]
false_positives: None.
fixes: []
see: [fragmentation]
references: [https://pytorch.org/docs/stable/notes/cuda.html]
examples:
  fires: [{incident: {requested: 2GiB, free: 1GiB, is_oom: true}}]
  silent: [{incident: {requested: 1GiB, free: 2GiB}}]
"""


def in_terminal(*arguments: str) -> str:
    """Run the command in a terminal of 120 columns and return what a person sees there."""
    code = "import sys; from oomdoctor.cli import main; sys.exit(main())"
    master, slave = pty.openpty()
    env = {**os.environ, "COLUMNS": "120", "TERM": "xterm-256color"}
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=slave, stderr=slave, env=env)
    os.close(slave)
    read = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux: the other end was closed
            break
        if not piece:
            break
        read += piece
    os.close(master)
    process.wait()
    return read.decode()


def test_a_pipe_gets_one_line_for_each_rule(capsys):
    assert main(["rules", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(files_in([locate()], [])))
    (line,) = (line for line in lines if line.startswith("graph_kept_alive "))
    assert "97%" in line
    assert "leak_or_pinned_graph" in line


def test_the_list_as_json_has_families_and_causes(capsys):
    assert main(["rules", "list", "--json"]) == 0
    listed = {rule["id"]: rule for rule in json.loads(capsys.readouterr().out)["rules"]}
    assert listed["worker_killed"]["family"] == "host"
    assert listed["worker_killed"]["cause"] == "worker_memory"


def test_show_tells_all_that_the_file_has(capsys):
    assert main(["rules", "show", "shared_memory_without_space"]) == 0
    told = capsys.readouterr().out
    for heading in ("Why it fills memory", "Fires when", "May be wrong", "Fires on", "Silent on", "References"):
        assert f"\n{heading}\n" in told
    assert "incident.family shm, incident.format shm_write" in told
    assert "\nprefetch, fewer_workers, persistent_workers_off\n" in told
    assert main(["rules", "show", "mapping_limit_reached"]) == 0
    assert "none that oomdoctor applies" in capsys.readouterr().out


def test_an_id_that_is_nearly_right_gets_a_suggestion(capsys):
    assert main(["rules", "show", "fragmentatoin"]) == 2
    assert "did you mean 'fragmentation'?" in capsys.readouterr().err


def test_check_knows_the_rules_that_one_of_mine_refers_to(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(RULE)
    assert main(["rules", "check", str(path)]) == 0
    assert capsys.readouterr().out == "1 rule, no faults\n"
    path.write_text(RULE.replace("[fragmentation]", "[fragmentatoin]"))
    assert main(["rules", "check", str(path)]) == 1
    out = capsys.readouterr().out
    assert out == f"{path}:12: there is no rule 'fragmentatoin'\n1 fault in 1 file; 0 rules without\n"


def test_check_refuses_the_id_of_a_shipped_rule(tmp_path, capsys):
    path = tmp_path / "fragmentation.yaml"
    path.write_text(RULE.replace("id: mine", "id: fragmentation"))
    assert main(["rules", "check", str(path)]) == 1
    assert "is the id of a rule that oomdoctor has" in capsys.readouterr().out


def test_check_takes_several_paths_and_counts_the_sound_ones(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(RULE)
    (tmp_path / "other.yaml").write_text("id: other\n")
    assert main(["rules", "check", "--json", str(tmp_path / "mine.yaml"), str(tmp_path / "other.yaml")]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["rules"] == 1
    assert {fault["path"] for fault in told["faults"]} == {str(tmp_path / "other.yaml")}


def test_check_without_a_path_checks_what_is_shipped(capsys):
    assert main(["rules", "check"]) == 0
    assert capsys.readouterr().out.endswith("rules, no faults\n")


def test_a_terminal_shows_the_line_of_a_fault(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(RULE.replace("confidence: 0.5", "confidence: 5"))
    assert "    confidence: 5" in in_terminal("rules", "check", str(path))


def test_a_place_that_is_not_there_is_bad_usage(tmp_path, capsys):
    assert main(["rules", "check", str(tmp_path / "none")]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "there is no such file or folder" in told.err


def test_a_folder_without_rules_is_bad_usage_and_not_a_success(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("none")
    assert main(["rules", "check", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"oomdoctor rules: there are no rule files in {tmp_path}\n")


@pytest.mark.parametrize("content", [b"", b"\x7fELF\x02\x01\x01\x00\xc0", b"\x00" * 300])
def test_a_file_that_is_no_rule_has_one_fault(content, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    assert main(["rules", "check", str(path)]) == 1
    fault, summary = capsys.readouterr().out.splitlines()
    assert fault.startswith(f"{path}:1: ")
    assert summary == "1 fault in 1 file; 0 rules without"
