"""What a reader sees of HTML: its text, its tags and its inline styles; of the text not what is drawn as well."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"br", "hr", "img", "input", "meta", "link", "wbr"}


class Seen(HTMLParser):
    """Collects tags, attributes and visible text; a tag that is not closed in order is a fault."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self._pieces: list[str] = []
        self._open: list[str] = []
        self._items: list[int] = []
        self._hidden = 0
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)
            self._hidden += bool(self._hidden) or ("aria-hidden", "true") in attrs
        if tag == "ol":
            self._items.append(0)
        if tag == "li" and self._open[-2] == "ol":
            self._items[-1] += 1
            self._pieces.append(f" {self._items[-1]}. ")
        if tag not in {"code", "span", "strong", "em", "small"}:
            self._pieces.append(" ")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self._hidden -= bool(self._hidden)
        if tag not in {"code", "span", "strong", "em", "small"}:
            self._pieces.append(" ")

    def handle_data(self, data: str) -> None:
        self._pieces += [] if self._hidden else [data]

    @property
    def text(self) -> str:
        return " ".join("".join(self._pieces).split())

    @property
    def styles(self) -> list[tuple[str, str, str]]:
        """Every inline declaration as tag, property and value."""
        return [
            (tag, *map(str.strip, declaration.split(":", 1)))  # type: ignore[misc]
            for tag, name, value in self.attributes
            if name == "style"
            for declaration in value.split(";")
            if declaration.strip()
        ]
