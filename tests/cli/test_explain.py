from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oomdoctor
from oomdoctor import fixes
from oomdoctor.cli import main
from oomdoctor.errors import UsageError
from oomdoctor.incident.formats import FORMATS

OOM = (
    "RuntimeError: CUDA out of memory. Tried to allocate 600.00 MiB (GPU 0; 7.50 GiB total capacity; 5.25 GiB already "
    "allocated; 100.00 MiB free; 7.00 GiB reserved in total by PyTorch)\n"
)
KILLED = "RuntimeError: DataLoader worker (pid 4242) is killed by signal: Killed.\n"
HALF = 8 << 20


@pytest.fixture
def told(tmp_path, capsys):
    """Return the status and the JSON of ``explain`` on some bytes."""

    def tell(data):
        path = tmp_path / "run.log"
        path.write_bytes(data)
        status = main(["explain", "--json", str(path)])
        return status, json.loads(capsys.readouterr().out)

    return tell


def filler(size, seed=0):
    """Return lines without a shape in common, as bytes."""
    draw = random.Random(seed)
    words = ("loss", "step", "epoch", "rate", "tokens", "second", "gradient", "norm", "eta", "scale")
    block = "\n".join(" ".join(draw.choices(words, k=12)) for _ in range(4000)).encode()
    return (block * (size // len(block) + 1))[:size]


def test_fixes_are_named_by_their_titles(tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_text(OOM)
    assert main(["explain", str(path)]) == 0
    out = capsys.readouterr().out
    assert "  Release the traceback of an earlier failure (`release_traceback`)\n" in out


def test_the_next_steps_name_the_rules_and_what_finds_the_change_that_fits(tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_text(OOM)
    assert main(["explain", str(path)]) == 0
    steps = " ".join(capsys.readouterr().out.partition("Next steps\n")[2].split())
    assert "The pool is fragmented: `oomdoctor rules show fragmentation` (docs/rules.md#fragmentation)" in steps
    assert "`oomdoctor run SCRIPT.py`" in steps
    assert "`oomdoctor explain memory.pickle`" in steps
    path.write_text("OSError: [Errno 28] No space left on device: '/data'")
    assert main(["explain", str(path)]) == 1
    assert "Next steps" not in capsys.readouterr().out


def test_the_title_of_every_fix_is_read_from_its_module_as_it_is_there():
    assert {fix: fixes.title(fix) for fix in fixes.ids()} == {fix.id: fix.title for fix in fixes.catalogue().values()}
    assert fixes.title("no_such_fix") == "no_such_fix"


def test_the_fixes_are_named_without_what_writes_source_code(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(OOM)
    code = (
        f"import sys\nfrom oomdoctor.cli import main\nmain(['explain', {str(path)!r}])\nprint('libcst' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_of_several_failures_the_root_is_told_first_and_the_others_below(tmp_path, capsys, told):
    text = f"KeyboardInterrupt\n\n{OOM}later\n{KILLED}{OOM}"
    status, facts = told(text.encode())
    assert status == 0
    assert facts["incident"]["family"] == "cuda_oom"
    assert [other["family"] for other in facts["others"]] == ["worker_killed", "not_oom"]
    path = tmp_path / "run.log"
    assert main(["explain", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("The program asked for 600 MiB")
    assert "  The caching allocator could not get the memory for a tensor." in lines
    others = " ".join(lines[lines.index("Also in this text") + 1 :])
    assert " ".join(others.split()) == (
        "The program lost a DataLoader worker, which was killed. "
        "The program failed with KeyboardInterrupt, not for lack of memory. The user interrupted the program."
    )


def test_of_ranks_that_fail_alike_each_device_is_told(tmp_path, capsys):
    text = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU {} has a total capacity of 8.00 GiB."
    path = tmp_path / "ranks.log"
    path.write_text("\n".join(map(text.format, (1, 0))), encoding="utf-8")
    assert main(["explain", str(path)]) == 0
    first, others = capsys.readouterr().out.split("Also in this text")
    assert "of cuda:1" in first
    assert "of cuda:0" in others


def test_what_is_no_oom_is_named_and_what_is_unknown_is_quoted(tmp_path, capsys):
    path = tmp_path / "run.log"
    for text, words in [
        ("OSError: [Errno 28] No space left on device: '/data'", "The disk is full."),
        ("ValueError: not enough values to unpack", "ValueError: not enough values to unpack"),
    ]:
        path.write_text(text)
        assert main(["explain", str(path)]) == 1
        out = capsys.readouterr().out
        assert "not for lack of memory" in " ".join(out.split())
        assert words in out


def test_every_number_is_bytes_or_null(told):
    _, facts = told(b"RuntimeError: CUDA error: out of memory")
    sizes = [facts["incident"][name] for name in ("requested", "total", "free", "allocated", "reserved")]
    assert sizes == [None] * 5
    _, facts = told(OOM.encode())
    assert facts["incident"]["total"] == 7.5 * (1 << 30)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le"])
def test_a_log_of_any_shell_is_read(encoding, told):
    assert told(OOM.encode(encoding))[1]["incident"]["requested"] == 600 << 20


@pytest.mark.parametrize("where", ["head", "tail", "middle"])
def test_of_a_long_log_the_head_and_the_tail_are_read(where, told):
    long = filler(2 * HALF)
    parts = {
        "head": (OOM.encode(), long, long),
        "tail": (long, long, OOM.encode()),
        "middle": (long, OOM.encode(), long),
    }
    status, facts = told(b"\n".join(parts[where]))
    assert status == (1 if where == "middle" else 0)
    assert [note.startswith("The text is longer than 16 MiB") for note in facts["notes"]] == [True]


def test_a_verdict_on_a_part_of_the_text_says_so(tmp_path, capsys, told):
    assert "notes" not in told(filler(2 * HALF))[1]
    path = tmp_path / "run.log"
    path.write_bytes(filler(2 * HALF + 1))
    assert main(["explain", str(path)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("The program failed with an error, not for lack of memory.")
    assert "its middle was not read" in out
    assert main(["explain", "--help"]) == 0
    assert "over 16 MiB" in capsys.readouterr().out


def test_python_and_the_notebook_say_what_the_shell_says_of_a_failure_that_is_not_of_memory():
    told = oomdoctor.explain("RuntimeError: CUDA error: device-side assert triggered")
    bundle = told._repr_mimebundle_()
    for shown in (str(told), bundle["text/plain"], bundle["text/html"]):
        assert "An assertion failed on the device, as a rule an index" in " ".join(shown.split())


@pytest.mark.parametrize("given_", [None, b"CUDA out of memory", 137])
def test_what_is_neither_text_nor_exception_is_bad_usage(given_):
    with pytest.raises(
        UsageError, match=r"^explain takes the text of a failure \(str\) or an exception, and was given"
    ):
        oomdoctor.explain(given_)


class Pipe(io.RawIOBase):
    """A pipe: it cannot seek, and gives no more than its buffer at once."""

    def __init__(self, data):
        self.data = io.BytesIO(data)

    def readable(self):
        return True

    def readinto(self, into):
        read = self.data.read(min(len(into), 1 << 16))
        into[: len(read)] = read
        return len(read)


def test_of_a_long_pipe_the_head_and_the_tail_are_read(monkeypatch, capsys):
    long = filler(2 * HALF + 12_345)
    for data, status in [(OOM.encode() + long, 0), (long + OOM.encode(), 0), (long + OOM.encode() + long, 1)]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Pipe(data))))
        assert main(["explain", "-"]) == status
    capsys.readouterr()


def test_sixteen_mebibytes_take_a_moment_and_load_no_torch(tmp_path):
    path = tmp_path / "run.log"
    path.write_bytes(filler(2 * HALF - len(OOM), seed=1) + OOM.encode())
    code = (
        "import sys, time\nfrom oomdoctor.cli import main\n"
        f"status = main(['explain', {str(path)!r}])\n"
        "print(time.process_time(), 'torch' in sys.modules, file=sys.stderr)\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    seconds, torch = done.stderr.split()
    assert (done.returncode, torch) == (0, "False")
    # Start-up included. Half of this on an idle core; the rest is for a busy one.
    assert float(seconds) < 3


def test_a_name_that_is_none_is_bad_usage(capsys):
    assert main(["explain", "run\0.log"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "there is no text"),
        (b" \n\t\n", "there is no text"),
        (bytes(50_000), "there is no text"),
        (b"\x7fELF\x02\x01\x01" + bytes(range(256)) * 20, "is not text"),
    ],
)
def test_what_is_no_text_is_bad_usage(content, words, tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_bytes(content)
    assert main(["explain", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert words in told.err
    assert told.err.count("\n") == 1


def test_the_hole_that_a_log_which_was_cut_begins_with_is_passed_over(told):
    status, facts = told(bytes(50_000) + OOM.encode())
    assert (status, facts["incident"]["requested"]) == (0, 600 << 20)


def test_a_failure_between_bytes_that_are_no_text_is_found_all_the_same(told):
    assert told(bytes(range(128, 256)) * 100 + b"\n" + OOM.encode())[0] == 0


@pytest.mark.parametrize("names", [("-", "-"), ("a.log", "b.log")])
def test_several_texts_are_bad_usage(names, capsys):
    assert main(["explain", *names]) == 2
    assert capsys.readouterr().err == "oomdoctor explain: one text at a time, and 2 were given\n"


def test_a_folder_is_bad_usage(tmp_path, capsys):
    assert main(["explain", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"oomdoctor explain: cannot read {tmp_path}: Is a directory\n"


def test_an_input_that_is_closed_is_bad_usage(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["explain"]) == 2
    assert capsys.readouterr().err == "oomdoctor explain: there is no input: it is closed\n"


def test_an_input_without_an_end_is_given_up(monkeypatch, capsys):
    monkeypatch.setattr("oomdoctor.cli.explain._LONGEST", 4 * HALF)
    assert main(["explain", "/dev/zero"]) == 2
    assert "the input has no end within" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_failure(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(OOM)
    command = f"{sys.executable} -m oomdoctor explain --json {path} | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300) | st.lists(st.sampled_from([row.sample for row in FORMATS]), max_size=4).map("\n".join))
def test_no_input_makes_the_command_fail_with_a_traceback(data):
    data = data.encode() if isinstance(data, str) else data
    stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BufferedReader(Pipe(data)))
    stdout, stderr, sys.stdout, sys.stderr = sys.stdout, sys.stderr, io.StringIO(), io.StringIO()
    try:
        assert main(["explain", "--json"]) in (0, 1, 2)
    finally:
        sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr


def test_in_python_the_object_shows_itself_as_text_and_as_html():
    explained = oomdoctor.explain(OOM)
    assert explained.incident.requested == 600 << 20
    assert [finding.rule for finding in explained.findings][:1] == ["fragmentation"]
    assert explained.to_dict()["incident"]["total"] == explained.incident.total
    assert "600 MiB" in str(explained)
    shown = explained._repr_mimebundle_()
    assert shown["text/plain"].strip()
    assert "600 MiB" in shown["text/html"]
    assert "<section" in shown["text/html"]


def test_in_python_the_failures_of_a_group_are_told_the_root_first():
    error = ExceptionGroup("job", [RuntimeError(OOM), MemoryError()])
    explained = oomdoctor.explain(error)
    assert explained.incident.family == "cuda_oom"
    assert [other.family for other in explained.others] == ["host_oom"]


def test_a_short_text_is_explained_in_milliseconds():
    oomdoctor.explain(OOM)
    start = time.process_time()
    oomdoctor.explain(OOM)
    assert time.process_time() - start < 0.1
