from __future__ import annotations

import pytest
from covering import few
from gathered import CORPUS, FILE, records
from mutants import mutants

from oomdoctor.incident import from_text
from oomdoctor.incident.formats import FORMATS

# A cut that swallows a space inside the one pattern that would have told more.
KNOWN = {
    ("rmm", "wrapped at 27"),
    ("numpy_class", "wrapped at 27"),
    ("mps_ndarray", "wrapped at 33"),
    ("bfc_allocator", "wrapped at 47"),  # "an" is left of "ran", and "an out of memory" tells of no failure
}

# What tells these from a lack of memory stands at their end.
SPEAKS_OF_MEMORY = {"jittor_child_ended", "killed_below_limit", "memlock", "tpu_vmem", "static_tls"}


def verdict(text):
    first = from_text(text)[0]
    return first.is_oom, first.family


@pytest.mark.parametrize("part", few([3, 1], [3]))
def test_the_verdict_on_a_sample_stays_whatever_is_done_to_it(part):
    """Each sample meets one in ``part`` of the ways, and each way one in ``part`` of the samples."""
    for number, row in enumerate(FORMATS):
        told, made = verdict(row.sample), list(mutants(row.sample))[number % part :: part]
        assert {(row.name, name) for name, mutant in made if verdict(mutant) != told} <= KNOWN


def share_changed(texts, part):
    """Return the share of verdicts that change; each text meets one in ``part`` of the ways, and each way of them."""
    tried = [
        verdict(mutant) == told
        for at, text in enumerate(texts)
        for told in [verdict(text)]
        for number, (_, mutant) in enumerate(mutants(text))
        if number % part == at % part
    ]
    return tried.count(False) / len(tried)


def test_the_verdict_on_gathered_messages_stays():
    texts = [record["text"] for record in records(FILE) if not record["ambiguous"]]
    assert share_changed(texts, 6) < 0.005


@pytest.mark.skipif(not CORPUS.is_file(), reason=f"there is no {CORPUS}")
def test_the_verdict_on_the_corpus_stays():
    texts = [record["text"] for record in records(CORPUS) if not record["ambiguous"]]
    assert share_changed(texts, 3) < 0.005


def cuts(text):
    """Yield ``text`` with its end cut off at a fifth and more, and with its beginning cut off."""
    step = max(1, len(text) // 25)
    for at in range(0, len(text), step):
        yield text[:at]
        yield text[at:]


def test_a_cut_message_is_read_without_an_error_and_a_cut_look_alike_is_no_oom():
    for row in FORMATS:
        read = [verdict(cut)[0] for cut in cuts(row.sample)]
        assert row.is_oom or row.name in SPEAKS_OF_MEMORY or not any(read), row.name


def test_what_torch_prints_is_an_oom_as_soon_as_it_says_so():
    text = next(row for row in FORMATS if row.name == "cuda_new").sample
    said = text.index("out of memory.") + len("out of memory.")
    assert all(verdict(text[:at])[0] for at in range(said, len(text)))
