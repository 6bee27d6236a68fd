"""A copy of the process: what it finds is the same beside other copies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from oomdoctor.sandbox.copies import Copy

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")


def opened() -> Iterator[list[int]]:
    yield list(os.pipe())


FEW = """\
import resource
from oomdoctor.sandbox.copies import Copy
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
print(*(told for told in Copy(lambda: ["told"], limit_s=60.0).wait()))
"""


def test_a_process_that_may_open_few_files_is_copied_too() -> None:
    done = subprocess.run([sys.executable, "-c", FEW], check=True, capture_output=True, text=True)
    assert done.stdout == "told\n"


def test_what_copies_open_at_the_same_time_has_the_same_file_descriptors() -> None:
    copies = [Copy(opened, limit_s=60.0) for _ in range(3)]
    told = [descriptors for copy in copies for descriptors in copy.wait()]
    assert len(told) == len(copies)
    assert len(set(map(tuple, told))) == 1


def test_beside_jittor_no_copy_is_made_that_would_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler of signals ends the process when a child of it was killed."""
    monkeypatch.setitem(sys.modules, "jittor", type(sys)("jittor"))
    copy = Copy(lambda: ["told"], limit_s=60.0)
    assert list(copy.wait()) == []
    assert (copy.over, copy.failed) == (True, "Jittor ends a process when a copy of it is ended")
    assert copy.end() is None
