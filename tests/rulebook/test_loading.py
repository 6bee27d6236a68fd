from __future__ import annotations

import re
import time

import pytest
import yaml

from oomdoctor.errors import UsageError
from oomdoctor.rulebook import load, locate
from oomdoctor.rulebook.loading import files_in

GOOD = """\
id: too_big
since: 0.1.0
title: Too big
what: What it looks at.
why: Why.
match: incident.requested > incident.free
confidence: 0.5
cause: unknown
because:
  - "{incident.requested:size} did not fit."
false_positives: None.
fixes: [micro_batch]
references: []
examples:
  fires:
    - incident: {requested: 2GiB, free: 1GiB}
  silent:
    - incident: {requested: 1GiB, free: 2GiB}
"""


@pytest.fixture
def check(tmp_path):
    def faults(text, name="too_big.yaml", known_fixes=("micro_batch",)):
        path = tmp_path / name
        path.write_text(text)
        return [(fault.line, fault.message) for fault in load([path], known_fixes=known_fixes).faults]

    return faults


def test_a_good_file_has_no_faults(check):
    assert check(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("title: Too big", "titel: Too big", 3, "no such key"),
        ("title: Too big\n", "", 1, "title is missing"),
        ("confidence: 0.5", "confidence: '0.5'", 7, "confidence: input should be a valid number"),
        ("confidence: 0.5", "confidence: 1.5", 7, "less than or equal to 1"),
        ("cause: unknown", "cause: gremlins", 8, "cause: input should be"),
        ("since: 0.1.0", "since: 0.1", 2, "since: input should be a valid string"),
        ("incident.free\n", "incident.fre\n", 6, "unknown attribute: 'fre'"),
        ("incident.free\n", "incident.family\n", 6, "data type mismatch"),
        ("> incident.free", "> > incident.free", 6, "syntax error"),
        ("match: incident.requested > incident.free", "match: incident.requested + 1", 6, "not a yes or no"),
        ("match: incident.requested > incident.free", "match: __import__('os')", 6, "refused"),
        ("match: incident.requested > incident.free", "match: incident.__class__ == 1", 6, "refused"),
        ("{incident.requested:size}", "{incident.requestd:size}", 10, "no fact 'incident.requestd'"),
        ("{incident.requested:size}", "{incident.requested}", 10, "write {incident.requested:size}"),
        ("{incident.requested:size}", "{incident.family:size}", 10, "is not a number"),
        ("{incident.requested:size}", "{incident.requested:huge}", 10, "cannot be printed as 'huge'"),
        ("{incident.requested:size}", "{incident.requested.real:size}", 10, "no fact"),
        ("{incident.requested:size}", "{incident", 10, "does not parse"),
        ("[micro_batch]", "[micro_batsch]", 12, "unknown fix 'micro_batsch'"),
        ("requested: 2GiB, free: 1GiB", "requested: 1GiB, free: 2GiB", 16, "does not fire on this example"),
        ("requested: 1GiB, free: 2GiB", "requested: 3GiB, free: 2GiB", 18, "fires on this example"),
        ("requested: 1GiB, free: 2GiB", "wanted: 1GiB", 18, "there is no fact 'incident.wanted'"),
        ("requested: 1GiB, free: 2GiB", "requested: lots", 18, "not a memory size"),
        ("requested: 1GiB, free: 2GiB", "is_oom: 1", 18, "is true or false"),
        ("id: too_big", "id: too_small", 1, "not the name of the file"),
        ("cause: unknown", "cause: unknown\ncause: host_ram", 9, "there twice"),
        ("cause: unknown", "cause: [unknown", 9, "not YAML"),
        ("cause: unknown", "cause: !!python/name:os.system", 8, "not YAML"),
        ("  silent:\n    - incident: {requested: 1GiB, free: 2GiB}\n", "", 14, "examples.silent is missing"),
        ("    - incident: {requested: 2GiB, free: 1GiB}\n", "    - 7\n", 16, "examples.fires.0: input should be"),
        (
            "  fires:\n    - incident: {requested: 2GiB, free: 1GiB}\n",
            "  fires: []\n",
            15,
            "examples.fires: list should have",
        ),
        ("match: incident.requested > incident.free", "match: []", 6, "match: "),
        ("match: incident.requested > incident.free", "match: 7", 6, "match: "),
        ("match: incident.requested > incident.free", "match: [incident.is_oom, 7]", 6, "match.1: "),
        ("incident.requested > incident.free", 'incident.source_line =~~ "("', 6, "expression is refused"),
        ("incident.requested > incident.free", 'incident.source_line =~~ "\\w+"', 6, "expression is refused"),
        ("references: []", "references: [pytorch.org/docs]", 13, "should match pattern"),
        ("references: []", "references: ['https://docs']", 13, "should match pattern"),
        ("references: []", "references: ['ftp://a.org/b']", 13, "should match pattern"),
        ("references: []", "references: ['https://a.org/b c']", 13, "should match pattern"),
        ("references: []", "references:\n  - https://a.org/b\n  - https://a.org/b", 13, "is there twice"),
        ("title: Too big", "title: '  '", 3, "nothing in it"),
        ("title: Too big", 'title: "\\e[31mred"', 3, "cannot be printed"),
        ("title: Too big", 'title: "a\\nb"', 3, "more than one line"),
        ("{incident.requested:size}", "{incident.requested!r:size}", 10, "mean nothing here"),
        ("[micro_batch]", "[micro_batch, micro_batch]", 12, "there twice"),
        ("requested: 2GiB, free: 1GiB", "requested: .nan, free: 1GiB", 16, "can be measured"),
        ("requested: 2GiB, free: 1GiB", "requested: .inf, free: 1GiB", 16, "can be measured"),
        ("references: []", "see: [nowhere]\nreferences: []", 13, "there is no rule 'nowhere'"),
        ("references: []", "see: [too_big]\nreferences: []", 13, "refers to itself"),
    ],
)
def test_each_fault_is_told_with_its_line(check, old, new, line, words):
    assert old in GOOD
    faults = check(GOOD.replace(old, new, 1))
    assert [number for number, message in faults if words in message] == [line], faults


def test_all_faults_of_all_files_are_told_at_once(tmp_path):
    (tmp_path / "one.yaml").write_text(GOOD.replace("too_big", "one").replace("unknown", "gremlins"))
    bad = GOOD.replace("too_big", "two").replace("[micro_batch]", "[nope]").replace("requested:size", "wanted:size")
    (tmp_path / "two.yaml").write_text(bad)
    (tmp_path / "good.yaml").write_text(GOOD.replace("too_big", "good"))
    book = load([tmp_path, tmp_path / "missing"], known_fixes=["micro_batch"])
    places = [(fault.path.rpartition("/")[2], fault.line) for fault in book.faults]
    assert places == [("missing", 1), ("one.yaml", 8), ("two.yaml", 10), ("two.yaml", 12)]
    assert [rule.id for rule in book.rules] == ["good"]


def test_an_id_stands_for_one_rule(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "too_big.yaml").write_text(GOOD)
    book = load([tmp_path], known_fixes=None)
    (fault,) = map(str, book.faults)
    assert re.search(r"b/too_big\.yaml:1: 'too_big' is the id of .*a/too_big\.yaml as well", fault)
    assert [rule.path for rule in book.rules] == [str(tmp_path / "a" / "too_big.yaml")]


def test_an_id_of_oomdoctors_own_is_taken(tmp_path):
    (tmp_path / "too_big.yaml").write_text("# mine\n" + GOOD)
    (fault,) = map(str, load([tmp_path], known_fixes=None, known_rules=["too_big"]).faults)
    assert "too_big.yaml:2: 'too_big' is the id of a rule that oomdoctor has" in fault


def test_a_missing_key_is_told_where_its_mapping_begins(check):
    faults = check("# my rule\n\n---\n" + GOOD.replace("title: Too big\n", ""))
    assert faults == [(4, "title is missing")]


def test_a_value_of_the_wrong_type_is_one_fault(check):
    for wrong in ("7", "[]", "{a: b}", "[7]"):
        assert len(check(GOOD.replace("match: incident.requested > incident.free", f"match: {wrong}"))) == 1


def test_rules_may_refer_to_one_another(tmp_path):
    for name, other in (("one", "two"), ("two", "one"), ("three", "shipped")):
        text = GOOD.replace("too_big", name).replace("references:", f"see: [{other}]\nreferences:")
        (tmp_path / f"{name}.yaml").write_text(text)
    book = load([tmp_path], known_fixes=None, known_rules=["shipped"])
    assert book.faults == ()
    assert [rule.file.see for rule in book.rules] == [["two"], ["shipped"], ["one"]]
    faults = load([tmp_path], known_fixes=None).faults
    assert [(fault.line, fault.message) for fault in faults] == [(13, "there is no rule 'shipped'")]


def test_a_file_that_an_editor_of_windows_wrote_is_read(tmp_path):
    path = tmp_path / "too_big.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load([path], known_fixes=None).get("too_big").file.title == "Too big"


@pytest.mark.parametrize("text", ["", "[]", "7", "a: &a [*a]", "--- 1\n--- 2", "\t", "{" * 2000, "x: " + "[" * 2000])
def test_no_file_is_too_odd_to_be_told_of(check, text):
    assert check(text)


def test_bytes_that_are_no_text_are_a_fault(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    (fault,) = map(str, load([tmp_path], known_fixes=None).faults)
    assert fault.endswith("x.yaml:1: the file is not text in UTF-8: line 1 has the byte 0xff")


def test_fixes_are_unchecked_where_none_are_known(check):
    assert check(GOOD.replace("[micro_batch]", "[nope]"), known_fixes=None) == []


def test_of_several_expressions_one_must_hold(check):
    several = GOOD.replace(
        "match: incident.requested > incident.free\n",
        "match:\n  - incident.requested > device.free\n  - incident.requested > incident.free\n",
    )
    assert check(several) == []
    # In one expression the fact that is not known would silence both parts.
    joined = several.replace("device.free\n  - ", "device.free or ")
    assert [message for _, message in check(joined)] == ["the rule does not fire on this example"]


def test_a_rule_is_got_by_its_id_or_not_at_all(tmp_path):
    (tmp_path / "too_big.yaml").write_text(GOOD)
    book = load([tmp_path], known_fixes=None)
    assert book.get("too_big").file.title == "Too big"
    with pytest.raises(UsageError, match="no rule 'x'"):
        book.get("x")


def test_every_text_of_the_shipped_rules_is_one_line_of_plain_yaml():
    for path in files_in([locate()], []):
        assert isinstance(yaml.safe_load(path.read_text()), dict)


BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    + ["id: too_big"]
)


@pytest.mark.parametrize("text", [BOMB, GOOD + "what: &w x\nwhy: *w\n", GOOD + "more: &m [*m]\n"])
def test_one_value_in_several_places_is_refused_at_once(check, text):
    began = time.monotonic()
    ((line, message),) = check(text)
    assert time.monotonic() - began < 2
    assert line >= 1
    assert message == "this is not YAML: it has an alias (`*name`): write the value out"
