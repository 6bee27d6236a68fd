"""Expressions of rules: what is refused, and that nothing which passes can fail."""

from __future__ import annotations

import subprocess
import sys

import pytest

from oomdoctor.rulebook.context import bound
from oomdoctor.rulebook.matching import _holds
from oomdoctor.rulebook.schema import compiled


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("incident.requested + incident.family > 3", "data type mismatch"),
        ("incident.requested > null", "data type mismatch"),
        ("incident.requested", "is a float, not a yes or no"),
        ("incident.requested > 10 ** 10000000", "refused"),
        ("$now > d'2020-01-01'", "$now is no fact"),
        ("$pi > incident.requested", "$pi is no fact"),
        ("$range(10 ** 12) == [1]", "calls nothing"),
        ("$any([incident.is_oom])", "calls nothing"),
        ("[x for x in [1, 2] if x > 1] == [1]", "calls nothing"),
        ("incident.frame =~~ incident.source_line", "must be written out"),
        ("incident.frame =~~ '('", "invalid regular expression"),
        ('incident.requested == "a lot"', "requested is a number, and it is compared with a word"),
        ('"a lot" != incident.requested', "requested is a number, and it is compared with a word"),
        ("incident.family == 3", "family is a word, and it is compared with a number"),
        ("incident.is_oom == 1", "is_oom is a yes or no, and it is compared with a number"),
        ('incident.is_oom and incident.requested in [1, "2"]', "requested is a number, and it is compared with a word"),
        ('incident.family == "cuda_ooom"', "no family is called 'cuda_ooom'"),
        ('incident.family in ["cuda_oom", "hip"]', "no family is called 'hip'"),
        ('census.largest_role != "activations"', "no role is called 'activations'"),
        ("not " * 3000 + "incident.is_oom", "nested too deeply"),
        ("incident.is_oom or " * 2000 + "incident.is_oom", "more than 20,000 characters"),
    ],
)
def test_what_is_no_comparison_of_facts_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"^the expression") as caught:
        compiled(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


COSTLY = [
    ('incident.frame =~~ "(a" + "+)+$"', "must be written out"),
    ("1 << 100000000000 > 1", "shifts nothing"),
    ("1e99999999999 & 1 == 1", "natural number"),
    ("(1e99999999999).floor > incident.requested", "too large"),
    ("2 ** 10000000000 > incident.requested", "arithmetic error"),
]
REFUSALS = """
import sys
from oomdoctor.rulebook.schema import compiled
for text in sys.argv[1:]:
    try:
        print("accepted", compiled(text))
    except ValueError as error:
        print(error)
"""


def test_what_is_costly_and_constant_is_refused_before_it_is_evaluated() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSALS, *(text for text, _ in COSTLY)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for line, (text, words) in zip(done.stdout.splitlines(), COSTLY, strict=True):
        assert line.startswith("the expression"), text
        assert words in line


def test_sums_of_constants_and_choices_between_facts_are_not() -> None:
    holds = "incident.requested > 20 * 1024 ** 2 and (incident.free ?? -1) in [-1, 0.5] and 0xff + 1 == incident.total"
    assert _holds(compiled(holds), bound({"incident": {"requested": 2**30, "total": 256}}))


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("incident.requested / incident.free > 1", {"requested": 1.0, "free": 0.0}),
        ("incident.requested % incident.free == 1", {"requested": 1.0, "free": 0.0}),
        ("incident.requested ** incident.free > 3", {"requested": 9e300, "free": 9e300}),
        ("incident.requested > 1", {"requested": float("nan")}),
        ("incident.requested > incident.free", {"requested": 1.0}),
        ("incident.frame =~~ 'x'", {}),
    ],
)
def test_a_sum_that_has_no_answer_does_not_hold(text: str, facts: dict[str, float]) -> None:
    assert not _holds(compiled(text), bound({"incident": facts}))
