"""What a model family is."""

from __future__ import annotations

from dataclasses import dataclass
from string import Template

__all__ = ["Family"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A notebook that trains a small model for five steps.

    Attributes:
        templates: the cells, the failing one last, with ``$size`` where the handle on the memory stands, and
            ``$samples`` for five batches of it.
        size: what the handle is set to: samples of a batch, or what else the activations grow with.
        share: of what it takes at its peak beyond its start, what it is given, so that it fails.
        models: names of the modules whose parameters and buffers a fix has promised something about.
        results: name of the list of numbers that the last cell leaves behind.
    """

    name: str
    templates: tuple[str, ...]
    size: int
    share: float = 0.7
    models: tuple[str, ...] = ("model",)
    results: str = "losses"

    def cells(self, size: int | None = None) -> tuple[str, ...]:
        """Return the source of the cells."""
        size = size or self.size
        return tuple(Template(text).substitute(size=size, samples=5 * size) for text in self.templates)
