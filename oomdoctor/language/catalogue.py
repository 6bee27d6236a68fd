"""Texts with their translations, and how a finished text is found among them.

Modules make their texts as f-strings, often out of parts that are texts themselves. So a finished text is matched with
the templates: ``{name}`` stands for anything, and what stands for it is translated in its turn. A text that no template
matches as a whole is taken apart at its punctuation, and the longest stretches that one does match are translated. Code
between backticks stays as it is.

Limits: what a placeholder stands for is found by the words around it; a name that is just a word of ours outside of
backticks is translated as well.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

HOLE: Final = re.compile(r"\{[^{}\s]*\}")
"""What is filled in: ``{name}``; in a translation ``{name#2}`` is the second of that name in the English."""
_SIZE: Final = r"(?:≈ )?[\d.,]+ (?:bytes?|[KMGTPE]iB|B)"
_NUMBER: Final = r"[\d.,]+"
_KINDS: Final = {
    **dict.fromkeys(("format_size", "about"), _SIZE),
    **dict.fromkeys(("n", "len", "line", "lineno", "peak_line", "number", "ranks"), _NUMBER),
    "percent": r"<?[\d.,]+ %",
    "device": r"(?:host memory|[\w:.-]+)(?: \(simulated\))?",
    "count": r"[\d.,]+(?: [\w ]+)?",
    "which": r"(?: \([^()]*\))?",
    "change": r"[+-][\d.,]+ \w+",
    "dtype": r"[a-z]+\d+.*",
    "fix": r"\w+(?:\([^()]*\))?(?:, \w+(?:\([^()]*\))?)*",
    "role": r"(?:your tensors|the batch|(?:optimizer|no|held|output|KV|pinned|graphs|workspaces) [\w ]+|[a-z]+s)",
    "figure": r"(?:[a-z]+|[RUP]SS|peak \w+|(?:page|process|open|address|memory) \w+)",
}
"""What placeholders of these names stand for; all others stand for anything."""
_CHINESE: Final = r"[\u3000-\u303f\u3400-\u9fff\uff00-\uffef]"
_HAS_CHINESE: Final = re.compile(_CHINESE)
_WORD: Final = re.compile(r"[^\W\d_]+")
_LETTERS: Final = re.compile(r"[A-Za-z]{2}")
_CODE: Final = re.compile(r"(`[^`]*`)")
_BETWEEN: Final = re.compile(r"(^[✓!] |。\s?|; |: |, |\. |\.$|:$| \(|^\(|\)|\n\s*)")
"""Where a text is taken apart."""
_EDGES: Final = " \n,;:.，；：。"
_PUNCTUATION: Final = (
    (re.compile(rf"(?<={_CHINESE})(?P<mark>[,;:])(?: |$)|(?P<other>[,;:]) (?={_CHINESE})"), None),
    (re.compile(r"(?<!^\d)(?<!^\d\d)\.(?: |$)"), "。"),
    (re.compile(r"(?<=[，；：。（）、]) +| +(?=[，；：。（）、])"), ""),
    (re.compile(r"(?<=[\u4e00-\u9fff]) (?=[\u4e00-\u9fff])"), ""),
    (re.compile(r"(?<=[\u4e00-\u9fff])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9])(?=[\u4e00-\u9fff])"), " "),
)
_FULL: Final = {",": "，", ";": "；", ":": "："}
_UNFINISHED: Final = re.compile(r": |[,;:]\s*$")
_SENTENCE: Final = re.compile(r"\b[a-z]{2,} [a-z]{2,}\b")
_BRACKETED: Final = re.compile(r"`[^`]*`| ?\((?P<inner>(?:`[^`]*`|[^()`])*)\)")
_BRACKETS: Final = re.compile(r"\([^()]*\)")
_CLAUSE: Final = re.compile(r"[;:.] ")
_MOST_PARTS: Final = 40
_LONGEST: Final = 20_000


def shipped() -> Iterator[tuple[str, str]]:
    """Yield the pairs of the catalogue, room by room; the words that rooms share come first."""
    for path in sorted(Path(__file__).with_name("zh").glob("*.yaml")):
        yield from read(path)


def read(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the pairs of one file, English texts with their translations; what has none yet stays English."""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with path.open("rb") as file:
        found = yaml.load(file, loader)
    yield from ((str(english), str(said)) for english, said in (found or {}).items() if said)


def holes(text: str) -> list[str]:
    """Return the placeholders of an English text, the later ones of a name numbered as translations number them."""
    seen: dict[str, int] = defaultdict(int)
    found = []
    for hole in HOLE.findall(text):
        seen[hole] += 1
        found.append(hole if seen[hole] == 1 else f"{hole[:-1]}#{seen[hole]}}}")
    return found


class _Hole(NamedTuple):
    """What one group of a template's pattern stands for.

    Attributes:
        is_code: whether it stands between backticks.
        is_open: whether it may run over several clauses, as it is the first or the last part in both languages.
    """

    is_code: bool
    is_open: bool


class _Template(NamedTuple):
    """An English text with what is filled in.

    Attributes:
        words: that a text has where it matches.
        weight: letters of its own.
        said: the translation, with the numbers of groups in it.
        ends_open: whether the last group ends the text, as what others have to say does.
    """

    pattern: str
    words: frozenset[str]
    weight: int
    groups: tuple[_Hole, ...]
    said: tuple[str | int, ...]
    ends_open: bool

    def match(self, text: str) -> tuple[str, ...] | None:
        """Return what the groups stand for in ``text``, None where it is another text."""
        match = _compiled(self.pattern).fullmatch(text)
        if match is None:
            return None
        for found, group in zip(match.groups(), self.groups, strict=True):
            is_more = len(found) > self.weight and not (self.ends_open and group is self.groups[-1])
            if not _is_balanced(found) or (is_more and _UNFINISHED.search(found)):
                return None
            if _is_clauses(found) and not (group.is_open or group.is_code):
                return None
        return match.groups()


class Catalogue:
    """Translations of texts.

    Args:
        pairs: English texts and their translations; of two for one text the first is taken.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._exact: dict[str, str] = {}
        sources: dict[str, tuple[str, str]] = {}
        for english, said in pairs:
            whole = _folded(english)
            if HOLE.search(english):
                sources.setdefault(whole, (_core(english), _core(said)))
            else:
                self._exact.setdefault(whole, said.strip(" ") if "\n" in said else _core(said))
        self._index = _indexed(sources.values())
        self.translated = lru_cache(maxsize=4096)(self._translated)

    def _translated(self, text: str) -> str:
        """Return ``text`` in the other language, as far as its parts are known."""
        if text.endswith(" ") and text[:-1] in _FULL:
            return _FULL[text[:-1]]
        if not _LETTERS.search(text) or len(text) > _LONGEST:
            return _punctuated(text) if _HAS_CHINESE.search(text) else text
        if "\n" in text:
            said = self._exact.get(_folded(text))
            lines = text.split("\n")
            return said if said is not None else "\n".join(map(self.translated, lines))
        found = self._said(text)
        return text if found == text else _punctuated(found)

    def _said(self, text: str) -> str:
        parts = _parts(text)  # parts, with what is between them at the odd places
        if len(parts) > 2 * _MOST_PARTS:
            return text
        out, at = [], 0
        while at < len(parts):
            for end in range(len(parts), at, -2):
                if not _is_stretch(parts, at, end):
                    continue
                stretch = "".join(parts[at:end])
                core = stretch.strip()
                said = self._whole(core) if _LETTERS.search(core) and _is_balanced(core) else None
                if said is not None:
                    lead, _, tail = stretch.partition(core)
                    out.append(f"{lead}{said}{tail}")
                    break
            else:
                end = at + 1
                out.append(parts[at])
            out.extend(parts[end : end + 1])
            at = end + 1
        return "".join(out)

    def _whole(self, text: str) -> str | None:
        """Return the translation of what one template matches to its end; the one with most text of its own wins."""
        if text.startswith("(") and text.endswith(")") and _is_balanced(text[1:-1]):
            inner = self._whole(text[1:-1])
            return inner and f"（{inner}）"
        said = self._exact.get(_folded(text))
        if said is not None:
            return said
        words = frozenset(map(str.lower, _WORD.findall(text)))
        candidates = [one for word in ("", *words) for one in self._index.get(word, ()) if one.words <= words]
        for one in sorted(candidates, key=lambda one: -one.weight):
            found = one.match(text)
            said = None if found is None else self._filled(one, found)
            if said is not None:
                return said
        return None

    def _filled(self, template: _Template, found: tuple[str, ...]) -> str | None:
        """Return the translation; None where English sentences stay in its midst, as of a text that is like ours."""
        said = [
            part if hole.is_code else self.translated(part) for part, hole in zip(found, template.groups, strict=True)
        ]
        for part, hole in zip(said[:-1] if template.ends_open else said, template.groups, strict=False):
            if not hole.is_code and len(part) > 2 * template.weight and _SENTENCE.search(_CODE.sub("", part)):
                return None
        return "".join(part if isinstance(part, str) else said[part] for part in template.said)


def _folded(text: str) -> str:
    core = _core(" ".join(text.split()))
    return core[:1].lower() + core[1:]


def _core(text: str) -> str:
    """Return a text without the punctuation at its ends, which parts of sentences have or not."""
    core = text.strip(_EDGES)
    for left, right in ("()", "（）"):
        if core.startswith(left) and core.endswith(right) and _is_balanced(core[1:-1]):
            core = core[1:-1]
    return core


def _is_balanced(text: str) -> bool:
    """Whether code and brackets that begin in ``text`` end in it."""
    if text.count("`") % 2:
        return False
    depth = 0
    for char in _CODE.sub("", text) if "(" in text or ")" in text else "":
        depth += (char == "(") - (char == ")")
        if depth < 0:
            return False
    return not depth


def _is_stretch(parts: list[str], start: int, end: int) -> bool:
    """Whether parts begin and end with text or a bracket, and not with other punctuation."""
    begins = parts[start].strip() or (start + 1 < end and "(" in parts[start + 1])
    ends = parts[end - 1].strip() or (end - 2 > start and ")" in parts[end - 2])
    return bool(begins and ends)


def _is_clauses(text: str) -> bool:
    """Whether a text is more than one clause, what stands in brackets and code aside."""
    return _CLAUSE.search(_BRACKETS.sub("", _CODE.sub("", text))) is not None


def _parts(text: str) -> list[str]:
    """Return the parts of a text between its punctuation, and that in the odd places; code is not taken apart."""
    parts = [""]
    for at, stretch in enumerate(_CODE.split(text)):
        if at % 2:
            parts[-1] += stretch
            continue
        first, *rest = _BETWEEN.split(stretch)
        parts[-1] += first
        parts += rest
    return parts


def _punctuated(text: str) -> str:
    """Return a text with the punctuation of Chinese beside Chinese."""
    parts = _CODE.split(_BRACKETED.sub(_bracket, text))
    for at in range(0, len(parts), 2):
        for pattern, full in _PUNCTUATION:
            parts[at] = pattern.sub(full if full is not None else _mark, parts[at])
    return "".join(parts)


def _bracket(match: re.Match[str]) -> str:
    inner = match["inner"] or ""
    return f"（{inner}）" if _HAS_CHINESE.search(_CODE.sub("", inner)) else match[0]


def _mark(match: re.Match[str]) -> str:
    return _FULL[match["mark"] or match["other"]]


def _indexed(sources: Iterable[tuple[str, str]]) -> dict[str, list[_Template]]:
    """Return the templates by their rarest word, those without one by the empty text."""
    templates = [_template(*source) for source in sources]
    frequency: dict[str, int] = defaultdict(int)
    for one in templates:
        for word in one.words:
            frequency[word] += 1
    index: dict[str, list[_Template]] = defaultdict(list)
    for one in (template for template in templates if template.weight):
        index[min(one.words, key=lambda word: (frequency[word], word), default="")].append(one)
    return index


def _template(english: str, said: str) -> _Template:
    literals, names = HOLE.split(english), holes(english)
    runs = list[str]()
    pattern, is_code = [_literal(literals[0], is_first=True)], list[bool]()
    for at, name in enumerate(names):
        if runs and not literals[at]:  # one right after the other: where the first ends cannot be told
            runs[-1] += name
            pattern[-2] = f"{pattern[-2][:-1]}.*?)"
        else:
            runs.append(name)
            is_code.append("".join(literals[: at + 1]).count("`") % 2 == 1)
            kind = _KINDS.get(name.strip("{}").partition("#")[0], ".*?")
            pattern += [f"({kind})", ""]
        pattern[-1] = _literal(literals[at + 1])
    pieces: list[str | int] = [said]
    for number, run in enumerate(runs):
        pieces = [part for one in pieces for part in (_around(one, run, number) if isinstance(one, str) else [one])]
    pieces = [one for one in pieces if one != ""]
    first, last = pieces[:1] == [0] and not literals[0], pieces[-1:] == [len(runs) - 1] and not literals[-1]
    words = re.findall(r"(?<![\w\0])[^\W\d_]+(?![\w\0])", "\0".join(literals))
    return _Template(
        pattern="".join(pattern),
        words=frozenset(map(str.lower, words)),
        weight=sum(map(len, literals)),
        groups=tuple(
            _Hole(code, (first and at == 0) or (last and at == len(runs) - 1)) for at, code in enumerate(is_code)
        ),
        said=tuple(pieces),
        ends_open=last,
    )


_compiled = lru_cache(maxsize=4096)(lambda pattern: re.compile(pattern, re.DOTALL))


def _around(text: str, run: str, number: int) -> list[str | int]:
    before, found, after = text.partition(run)
    return [before, number, *_around(after, run, number)] if found else [text]


def _literal(text: str, *, is_first: bool = False) -> str:
    if is_first and text[:1].isalpha():  # a sentence may begin with it
        return f"[{text[0].lower()}{text[0].upper()}]{re.escape(text[1:])}"
    return re.escape(text)
