"""What attention that is written out is made of: scores, weights, and their product with the values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import libcst as cst

from oomdoctor.program import rewriting

__all__ = ["Attention", "NotRead", "Read", "Scores", "Weights"]


class NotRead(Exception):
    """The reading stopped; the text is the reason in one sentence. Never leaves the fixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Products of queries and keys.

    Attributes:
        scale: text of what they are multiplied by, or ``default``; None where they are as they come.
        mask: text of ``attn_mask``, None where there is none.
    """

    query: str
    key: str
    scale: str | None = None
    mask: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The softmax of scores.

    Attributes:
        dropout: text of the probability with which some are dropped; ``by_layer``: a layer does it, which proposals
            announce.
    """

    scores: Scores
    dropout: str | None = None
    by_layer: bool = False


Read: TypeAlias = Scores | Weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attention:
    """One attention in a block of statements.

    Attributes:
        steps: the statements that made the weights, which go.
        last: the statement with the product of weights and values, and ``product``: that product.
        between: other statements among them.
        names: names that scores and weights went by.
        layers: texts of the layers that were called on them.
    """

    weights: Weights
    value: str
    steps: tuple[rewriting.Statement, ...]
    last: rewriting.Statement
    product: cst.BaseExpression
    between: tuple[rewriting.Statement, ...] = ()
    names: frozenset[str] = frozenset()
    layers: frozenset[str] = frozenset()
