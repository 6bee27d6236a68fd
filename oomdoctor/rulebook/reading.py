"""Reads one file of a rule: a text of a limited size, as plain YAML whose values know their lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

_LARGEST: Final = 256 << 10


def text_of(path: Path) -> str:
    """Return the text of a file, without the mark that editors of Windows put first.

    Raises:
        ValueError: it is no file, too large, no text in UTF-8, or cannot be read; the message says which, in one line.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe that nobody writes to would be waited for
            raise ValueError("this is not a plain file")
        content = path.read_bytes() if path.stat().st_size <= _LARGEST else None
    except OSError as error:
        raise ValueError(f"the file cannot be read: {error.strerror or error}") from None
    if content is None:
        raise ValueError(f"a rule file has at most {_LARGEST >> 10} KiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise ValueError(f"the file is not text in UTF-8: line {line} has the byte {byte:#04x}") from None


_DEEPEST: Final = 20
"""Levels of lists and mappings, of which a rule has five. The composer in C goes down by calls, and has no limit."""

# The parser in C is several times as fast; a build of PyYAML without libyaml does not have it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class NotYaml(ValueError):
    """A text that is no plain YAML; the message says why in one line, and ``line`` where."""

    def __init__(self, message: object, line: int) -> None:
        super().__init__(f"this is not YAML: {' '.join(str(message).split())}")
        self.line = line


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file: its values, and the tree that knows their lines."""

    values: Any
    root: yaml.Node | None

    def line(self, path: Sequence[str | int] = ()) -> int:
        """Return the one-based line of the value at ``path``, or of the innermost part of the path that exists."""
        node, line = self.root, 1
        if node is not None:
            line = node.start_mark.line + 1
        for step in path:
            found = _child(node, step)
            if found is None:
                break
            line, node = found
        return line

    def repeated(self) -> Iterator[tuple[str, int]]:
        """Yield each key that stands in its mapping already, with its line: YAML would keep the last in silence."""
        yield from _repeated(self.root)


def parse(text: str) -> Document:
    """Return the document in ``text``.

    Raises:
        NotYaml: it is none, is nested too deeply, has an alias, more than one document, or a tag but the plain ones.
    """
    try:
        _refuse_depth_and_aliases(text)
        loader = _Loader(text)
        root = loader.get_single_node()
        return Document(values=None if root is None else loader.construct_document(root), root=root)
    except NotYaml:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise NotYaml(error.problem or error.context, mark.line + 1 if mark else 1) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise NotYaml("it has a character that cannot be printed", line) from None
    except (ValueError, ArithmeticError, AttributeError, LookupError, TypeError) as error:  # a date that is none
        raise NotYaml(error, 1) from None


def _refuse_depth_and_aliases(text: str) -> None:
    """Refuse what is nested without end, and one value in several places: a few lines of those are a billion values."""
    depth = 0
    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        wrong = "it has an alias (`*name`): write the value out" if isinstance(event, yaml.AliasEvent) else None
        if depth > _DEEPEST:
            wrong = f"it is nested more than {_DEEPEST} levels deep"
        if wrong:
            raise NotYaml(wrong, event.start_mark.line + 1)


def _child(node: yaml.Node | None, step: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(step):
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        item: yaml.Node = node.value[step]
        return item.start_mark.line + 1, item
    return None


def _repeated(node: yaml.Node | None) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                yield key.value, key.start_mark.line + 1
            names.add(str(key.value))
            yield from _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated(item)
