"""Takes the text of a program out of what carries it: a notebook's file, JSON log lines, a container's log.

Limits: JSON over several lines is read only where it is a notebook; of a notebook that was cut, nothing is taken out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

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
