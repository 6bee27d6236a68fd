"""How losses of ``torch.nn`` reduce, as far as their calls and constructors write it out."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Final

__all__ = ["IGNORING", "SAMPLE_LOSSES", "CannotSplit", "LossForm", "called", "function_form", "loss_made_by"]


class CannotSplit(Exception):
    """A step is not taken apart; the text is the reason in one sentence. Never leaves the fixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossForm:
    """How a loss of ``torch.nn`` reduces.

    Attributes:
        ignored: source text of its ``ignore_index``, None where it is not set.
    """

    name: str
    reduction: str = "mean"
    ignored: str | None = None


_FUNCTIONS: Final = {
    "cross_entropy": "CrossEntropyLoss",
    "nll_loss": "NLLLoss",
    "mse_loss": "MSELoss",
    "l1_loss": "L1Loss",
    "smooth_l1_loss": "SmoothL1Loss",
    "huber_loss": "HuberLoss",
    "binary_cross_entropy": "BCELoss",
    "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
    "kl_div": "KLDivLoss",
    "poisson_nll_loss": "PoissonNLLLoss",
    "gaussian_nll_loss": "GaussianNLLLoss",
    "soft_margin_loss": "SoftMarginLoss",
    "multi_margin_loss": "MultiMarginLoss",
    "multilabel_margin_loss": "MultiLabelMarginLoss",
    "multilabel_soft_margin_loss": "MultiLabelSoftMarginLoss",
    "hinge_embedding_loss": "HingeEmbeddingLoss",
    "margin_ranking_loss": "MarginRankingLoss",
    "cosine_embedding_loss": "CosineEmbeddingLoss",
    "triplet_margin_loss": "TripletMarginLoss",
}
SAMPLE_LOSSES: Final = frozenset(_FUNCTIONS.values())
"""Losses that have a term for each sample."""

IGNORING: Final = frozenset({"CrossEntropyLoss", "NLLLoss"})


def called(node: ast.AST) -> str:
    """Return the dotted name that ``node`` is, empty where it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := called(node.value)):
        return f"{base}.{node.attr}"
    return ""


def loss_made_by(node: ast.AST) -> LossForm | None:
    """Return the loss that a constructor such as ``nn.CrossEntropyLoss(reduction="sum")`` makes, if it is one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"to", "cuda"}:
        node = node.func.value
    kind = called(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    return _with_keywords(kind, node) if isinstance(node, ast.Call) and kind in SAMPLE_LOSSES else None


def _with_keywords(name: str, call: ast.Call) -> LossForm:
    told = {one.arg: one.value for one in call.keywords}
    reduction, ignored = told.get("reduction"), told.get("ignore_index")
    return LossForm(
        name=name,
        reduction=str(reduction.value) if isinstance(reduction, ast.Constant) else "mean",
        ignored=ast.unparse(ignored) if ignored is not None else None,
    )


def function_form(call: ast.Call) -> LossForm | None:
    """Return how the loss function that ``call`` calls reduces, if it is one."""
    kind = _FUNCTIONS.get(called(call.func).rpartition(".")[2])
    return _with_keywords(kind, call) if kind is not None else None
