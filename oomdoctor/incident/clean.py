"""Makes plain lines out of what a terminal, a notebook or a log collector made of a message.

Of a long text, stretches with none of the words of any message are left out, and where megabytes remain, their middle,
apart from what says in so many words, of some languages, that memory ran out.

Limits: a prefix that no tool in the table prints stays, unless the lines beside it have the same one; and a line that
was cut in the middle of a number is put together again only where the words around the number tell so. JSON over
several lines is read only where it is a notebook; of a notebook that was cut, nothing is taken out.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Final

from oomdoctor.incident.formats import lowered_of

LIMIT: Final = 16 << 20
"""Characters that are read; of a longer text the first and the last half of this."""

_ANSI: Final = re.compile(r"\x1b(?:\[[0-9;:?<=>]{0,64}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)?|[@-Z\\^_])")
_WRITTEN_ANSI: Final = re.compile(
    r"(?:\^\[|\\x1b|\\u001b|\\033|\\e|�|␛)\[(?:\d{1,3}(?:;\d{1,3}){0,5})?m|\[(?:(?:[0-4]|7|2[2-7]|[349][0-9]|10[0-7]|[34]8;[25])(?:;\d{1,3}){0,4})m(?!s\b)",
    re.IGNORECASE,
)
"""Colours whose escape character was written out or lost on the way."""

_CHARACTERS: Final = (
    dict.fromkeys((*range(9472, 9632), 9, 160, *range(8192, 8203), 8239, 8287, 12288), " ")  # frames and spaces
    | dict.fromkeys((173, *range(8203, 8208), *range(8234, 8239), 8288, 65279, 0))  # of no width
    | dict.fromkeys((*range(8216, 8220), 8249, 8250, 96, 180), "'")
    | dict.fromkeys((*range(8220, 8224), 171, 187, 12300, 12301), '"')
    | {13: "\n", 8208: "-", 8209: "-", 8210: "-", 8211: "-", 8212: "-", 8722: "-"}
    | {65306: ":", 65292: ",", 65288: "(", 65289: ")", 65307: ";"}
)
_ENTITY: Final = re.compile(r"&(?:#\d{2,6}|#x[0-9a-f]{2,6}|[a-z]{2,8});", re.IGNORECASE)
_TAG: Final = re.compile(r"</?(?:br|b|i|p|pre|code|span|div)\b[^<>\n]{0,100}>", re.IGNORECASE)
_SPACES: Final = re.compile(r" {2,}")
_WRITTEN_LETTER: Final = re.compile(r"\\u(?!d[89a-f])([0-9a-f]{4})", re.IGNORECASE)
"""A letter of JSON that is not ASCII; halves of a pair stay as they are."""
_WRITTEN_LINE_END: Final = re.compile(
    r"(?:\\r)?\\n(?=[A-Z\s\"'\\]|$|(?:\w{1,40}\.){1,6}_?[A-Z]\w{2,60}(?:Error|Exception|OutOfMemory)\b)"
)
"""A line's end inside a quoted string. In front of a small letter it is a folder of Windows, unless a class begins."""

_DAY: Final = r"(?:\d{4}[-/.]\d\d[-/.]\d\d|\d\d/\d\d/(?:\d{4}|\d\d)|\d\d-\d\d)"
_CLOCK: Final = r"\d\d:\d\d:\d\d(?:[.,:]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_LEVEL: Final = r"(?:ERROR|INFO|WARNING|WARN|CRITICAL|FATAL|DEBUG|TRACE|ERR|error|info|warning|fatal)"
_PREFIX: Final = re.compile(
    r"(?:[>#|]{1,3} "
    r"|E {1,4}(?=\S)"
    r"|\[(?:rank|default|trainer|node|worker)[ _-]?\d{1,5}\]:? ?"
    r"|\[\d{1,4},\d{1,6}\]<std(?:err|out)>:? ?"
    r"|\((?:\w{1,40}(?: \w{1,40})? )?(?:pid|rank|ip)=[^)\n]{1,80}\) ?"
    r"|\((?:raylet|autoscaler[^)\n]{0,40})\) ?"
    rf"|[\[(](?:\w{{1,10}} )?(?:{_DAY}[T_ -]{{1,2}})?{_CLOCK}(?: [^\]\)\n]{{0,60}})?[\])]:? ?"
    r"|\[ {0,6}\d{1,8}\.\d{3,9}\] ?"
    rf"|{_DAY}[T_ ]{_CLOCK}:? "
    rf"|{_CLOCK}:? (?:-+ )?"
    rf"|- [\w.-]{{1,60}} - (?={_LEVEL})"
    rf"|[EWIF]\d{{4}} {_CLOCK} {{1,6}}\d{{1,9}} [\w./-]{{1,80}}:\d{{1,6}}\] "
    r"|<\d{1,2}>(?=\[)"
    rf"|[A-Z][a-z]{{2}} {{1,2}}\d{{1,2}} {_CLOCK} [\w.-]{{1,60}} [\w./-]{{1,40}}(?:\[\d{{1,9}}\])?: "
    rf"|\[ ?{_LEVEL}(?::[\w.]{{1,60}})? ?\]:? ?"
    rf"|{_LEVEL}:[\w.]{{1,80}}: ?"
    rf"|{_LEVEL} {{0,4}}(?:\||-{{1,2}}) "
    rf"|{_LEVEL} {_DAY} {_CLOCK} "
    r"|\[[\w./-]{1,80}:\d{1,6}\] ?"
    r"|[\w.-]{1,60} {0,20}\| "
    r"|\d{1,4}: (?=\D)"
    r"|::(?:error|warning|notice)[^:\n]{0,200}::|##\[\w{1,12}\]"
    r"|\{\"(?:log|message|msg|text)\": ?\""
    r"){1,6}"
)
_COMMENT: Final = re.compile(r"(?:/?\*+|//+) ")
"""Where the lines of a comment begin alike: it tells that they are source code."""
_BOUNDARY: Final = re.compile(r"(?:[:>|\])*+-]|^[^\s\w]{1,8}) (?!.*[:>|\])*+-] )")
"""Where a prefix ends that neighbouring lines share."""
_NO_PREFIX: Final = re.compile(
    r"(?<![\[(|<])(?:error|exception|warning|fail)|File|Process|alloc|request|memory|limit|free", re.IGNORECASE
)
"""Words of a message, unless they stand in brackets."""
_LONGEST: Final = 100
_SHORTEST: Final = 4
"""Characters of a prefix that is a word; less is the end of one that a wrap cut."""


def clean(text: str) -> str:
    """Return ``text`` in lines without colours, frames, log prefixes and runs of spaces."""
    return "\n".join(line.strip() for line in clean_lines(text))


def clean_lines(text: str) -> list[str]:
    """Return the clean lines of ``text``, each with the single space that a wrap may have left at either end.

    Of a long text, what cannot matter is left out (see ``thin``).
    """
    text = log_text(thin(notebook_output(ends(text, LIMIT))))
    text = _ANSI.sub("", text)
    if "m" in text and "[" in text:
        text = _WRITTEN_ANSI.sub("", text)
    if "\\u" in text:
        text = _WRITTEN_LETTER.sub(lambda letter: chr(int(letter[1], 16)), text)
    text = text.replace("\r\n", "\n")
    if "<" in text:
        text = _TAG.sub(lambda tag: "\n" if tag[0][1:3].lower() == "br" else "", text)
    if "&" in text:
        text = _ENTITY.sub(lambda entity: html.unescape(entity[0]), text)
    if not text.isascii() or any(letter in text for letter in "\t\r\0`"):
        text = text.translate(_CHARACTERS)
    if "\\n" in text:
        text = _WRITTEN_LINE_END.sub("\n", text)
    text = text.replace("\\'", "'").replace('\\"', '"')
    lines = [_line(line) for line in text.split("\n")]
    if 2 * sum(line[:1] == " " for line in lines) > len(lines):  # an indentation, and not what a wrap left
        lines = [line[line[:1] == " " :] for line in lines]
    return list(_without_shared(lines))


def _line(line: str) -> str:
    bare = _SPACES.sub(" ", line.strip()) if "  " in line else line.strip()
    if bare[:2] == "| " and bare[-2:] == " |":
        bare = bare[2:-2].strip()
    found = _PREFIX.match(bare)
    if found:
        bare = bare[found.end() :].lstrip()
    before = " " if line[:1] == " " != line[1:2] and not found else ""
    after = " " if line[-1:] == " " and line[-2:-1] not in " |" else ""
    return f"{before}{bare}{after}" if before or after else bare


def _without_shared(lines: list[str]) -> Iterator[str]:
    """Yield the lines without the prefix that a line has in common with the one before or after it."""
    shared = [_shared(one, two) for one, two in pairwise(lines)]
    for line, before, after in zip(lines, [0, *shared], [*shared, 0], strict=True):
        yield line[max(before, after) :]


def _shared(one: str, two: str) -> int:
    """Return the length of the prefix that two lines share."""
    if one[:2] != two[:2] or len(one) < 3:
        return 0
    length = min(len(one), len(two), _LONGEST)
    same = one[: next((at for at in range(length) if one[at] != two[at]), length)]
    found = _BOUNDARY.search(same) if one != two and not _COMMENT.match(same) else None
    if not found or _NO_PREFIX.search(same) or (same[:1].isalpha() and found.end() < _SHORTEST):
        return 0
    return found.end()


_MESSAGE_KEYS: Final = frozenset((
    "log", "message", "msg", "text", "event", "error", "err", "exc_info", "exc_text", "exception", "stack",
    "stack_trace", "stacktrace", "traceback", "detail", "details", "reason", "output", "line", "body", "textpayload",
    "evalue",
))  # fmt: skip
"""What the fields of a log record are called that a program wrote into."""
_STATE_KEYS: Final = frozenset({"oomkilled", "exitcode", "exit_code", "returncode", "signal"})
"""What the fields of a record are called that tell how a process ended; such a record stays as it is."""
_BEFORE: Final = 60
"""Characters of a prefix that may stand before a record."""
_CONTAINER: Final = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d) (?:stdout|stderr) (?P<kind>[FP])(?::\w{0,4})? "
)
"""What a container runtime of Kubernetes puts before each line; P marks a part that the next line goes on with.

Source: the CRI logging format, kubernetes/design-proposals-archive, ``kubelet-cri-logging.md``.
"""


def notebook_output(text: str) -> str:
    """Return what the cells of a notebook's file put out, or ``text`` where it is no such file."""
    if text.lstrip("\ufeff \t\r\n")[:1] != "{" or '"nbformat"' not in text:
        return text
    try:
        notebook = json.loads(text.lstrip("\ufeff"))
        return "\n".join(_outputs(notebook))
    except (ValueError, RecursionError):
        return text


def _outputs(notebook: Any) -> Iterator[str]:
    sheets = _dicts(notebook.get("worksheets")) or [notebook]  # a level of nbformat 3
    for sheet in sheets:
        for cell in _dicts(sheet.get("cells")):
            for output in _dicts(cell.get("outputs")):
                yield from _output(output)


def _output(output: dict[str, Any]) -> Iterator[str]:
    if output.get("traceback"):
        yield "\n".join(_strings(output["traceback"]))
    elif "ename" in output:
        yield f"{output['ename']}: {output.get('evalue', '')}"
    data = output.get("data")
    plain = data.get("text/plain") if isinstance(data, dict) else None
    for part in (output.get("text"), plain):
        if part:
            yield "".join(_strings(part))


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _strings(value: Any) -> list[str]:
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def log_text(text: str) -> str:
    """Return ``text`` with each JSON record replaced by its messages, and without the prefixes of containers."""
    if '{"' in text or '{ "' in text:
        text = "".join(map(_record, text.splitlines(keepends=True)))
    if " stderr " in text or " stdout " in text:
        text = "".join(map(_container_line, text.splitlines(keepends=True)))
    return text


def _container_line(line: str) -> str:
    found = _CONTAINER.match(line)
    if found is None:
        return line
    return line[found.end() :].rstrip("\r\n") if found["kind"] == "P" else line[found.end() :]


def _record(line: str) -> str:
    """Return what a line says that is a JSON object; Docker's ends without a line's end where the next one goes on."""
    start = line.find("{")
    bare = line.rstrip()
    if start < 0 or bare[-1:] != "}" or line[start + 1 : start + 3].strip()[:1] != '"' or start > _BEFORE:
        return line
    try:
        record = json.loads(bare[start:])
        said = list(_messages(record))
    except (ValueError, RecursionError):
        return line
    if not said:
        return line
    if "log" in record and "stream" in record:
        return "".join(said)
    return "\n".join(said) + "\n"


def _messages(record: dict[str, Any]) -> Iterator[str]:
    if not _STATE_KEYS.isdisjoint(map(str.lower, record)):
        raise ValueError("this tells how a process ended")
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _messages(value)
        elif key.lower() in _MESSAGE_KEYS:
            yield from _strings(value)


_LONG: Final = 1 << 19
"""Characters from which on what cannot matter is left out."""
_ABOVE, _BELOW = 24_000, 6_000
"""Characters that are kept around an anchor: the traceback above a message, and the message."""
_MOST: Final = 1 << 20
"""Characters around anchors that are kept."""
_ENDS: Final = 60
"""Hits of an anchor that are looked at from either end of the text, before any others."""

STRONG: Final = (
    "out of memor", "outofmemor", "out_of_memor", "not enough memor", "insufficient memor", "memoryerror",
    "alloc_failed", "allocate memory", "to allocate", "bad_alloc",
    "oom-kill", "oomkill", "oom_kill", "oom kill", "killed", "is killed by",
    "exhausted",
)  # fmt: skip
"""What is said where memory ran out, looked for before all else."""
ANCHORS: Final = (
    "emor", "lloc", "kill", "exhaust", "rror", "ernel", "signal", "fail", "rash", "137", "shm", "torch", "seg",
    "oom", "badness", "keyboardint", "driver", "timeo", "timed o", "peer", "invalid",
)  # fmt: skip
"""Pieces of words that the messages of the table have. What is said in ``STRONG`` contains one of them."""
TRANSLATED: Final = (
    *("已杀死", "无法分配内存", "getötet", "processus arrêté", "強制終了", "убито"),
    *("显存", "内存不足", "内存溢出", "メモリ不足", "メモリが", "메모리 부족"),
)
"""The same in the languages that are met most; looked for where a text is not ASCII."""


def thin(text: str) -> str:
    """Return ``text`` as it is where it is short, and otherwise without what cannot matter."""
    return text if len(text) <= _LONG else _around_anchors(text)


def ends(text: str, most: int) -> str:
    """Return ``text``, of a longer one the first and the last half of ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}\n{text[-(most // 2) :]}"


def _around_anchors(text: str) -> str:
    lowered = lowered_of(text)
    spans: list[tuple[int, int]] = [(0, _BELOW), (max(0, len(text) - _ABOVE), len(text))]
    there = [anchor for anchor in ANCHORS if anchor in lowered]
    said = [strong for strong in STRONG if any(anchor in strong for anchor in there)]
    for words in (*said, *(() if text.isascii() else TRANSLATED), *there):
        places = list(_hits(lowered, words))
        more = _merged(spans + _around([*places[:_ENDS], *places[-_ENDS:]], len(text)))
        if sum(high - low for low, high in more) <= _MOST:
            spans = more
    return "\n".join(text[low:high] for low, high in spans)


def _around(places: Iterable[int], end: int) -> list[tuple[int, int]]:
    return [(max(0, at - _ABOVE), min(end, at + _BELOW)) for at in places]


def _hits(lowered: str, anchor: str) -> Iterator[int]:
    """Yield where ``anchor`` stands; of hits close to one another the first, whose surroundings have the others."""
    at = lowered.find(anchor)
    while at >= 0:
        yield at
        at = lowered.find(anchor, at + _BELOW // 2)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged
