"""Where in a YAML file a value stands, so that a fault can name its line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

_DEEPEST: Final = 20
"""Levels of lists and mappings, of which a rule has five. The composer in C goes down by calls, and has no limit."""

# The parser in C is several times as fast; a build of PyYAML without libyaml does not have it.
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Parser):  # type: ignore[misc]
    """Says where a value stands that looks like a date or a number and is none."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except (ValueError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from None


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
        yaml.YAMLError: it is no YAML, is nested too deeply, has more than one document, or a tag other than the plain
            ones.
    """
    _refuse_depth(text)
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        _refuse_aliases(root)
        return Document(values=None if root is None else loader.construct_document(root), root=root)
    finally:
        loader.dispose()


def _refuse_depth(text: str) -> None:
    depth = 0
    event: Any
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST:
            raise yaml.composer.ComposerError(
                None, None, f"it is nested more than {_DEEPEST} levels deep", event.start_mark
            )


def _refuse_aliases(root: yaml.Node | None) -> None:
    """Refuse a document in which one value stands in several places: a few lines of those are a billion values."""
    seen: set[int] = set()
    waiting = [] if root is None else [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            raise yaml.constructor.ConstructorError(
                None, None, "it has an alias (`*name`): write the value out", node.start_mark
            )
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            waiting += [one for pair in node.value for one in pair]
        elif isinstance(node, yaml.SequenceNode):
            waiting += node.value


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
