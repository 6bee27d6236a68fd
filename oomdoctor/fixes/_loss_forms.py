"""How losses of ``torch.nn`` reduce, as their calls and constructors say it, and the reason where they do not."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Final

__all__ = [
    *("IGNORING", "NAMESPACES", "REDUCES_BY"),
    *("LossForm", "CannotSplit", "called", "function_form", "loss_made_by"),
]


class CannotSplit(Exception):
    """A step is not taken apart; the text is the reason in one sentence. Never leaves the fixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossForm:
    """How a loss of ``torch.nn`` reduces."""

    name: str
    reduction: str = "mean"
    ignore_index: int | None = None


NAMESPACES: Final = frozenset({"torch", "F", "torch.nn.functional", "nn.functional", "functional"})

_SAMPLE_LOSSES: Final = {
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
REDUCES_BY: Final = frozenset({"reduction", "ignore_index"})
"""Arguments of a loss that decide over what its mean is taken."""

IGNORING: Final = frozenset({"CrossEntropyLoss", "NLLLoss"})


def called(node: ast.AST) -> str:
    """Return the dotted name that ``node`` is, empty where it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := called(node.value)):
        return f"{base}.{node.attr}"
    return ""


def loss_made_by(node: ast.AST, imported: frozenset[str] = frozenset()) -> LossForm | None:
    """Return the loss that a constructor such as ``nn.CrossEntropyLoss(reduction="sum")`` makes, if it is one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"to", "cuda"}:
        node = node.func.value
    name = called(node.func) if isinstance(node, ast.Call) else ""
    base, _, kind = name.rpartition(".")
    known = kind in _SAMPLE_LOSSES.values() and (base in {"nn", "torch.nn"} or (not base and kind in imported))
    if not known or not isinstance(node, ast.Call):
        return None
    return _with_keywords(LossForm(name=kind), node)


def _with_keywords(form: LossForm, call: ast.Call) -> LossForm:
    for keyword in call.keywords:
        if keyword.arg in REDUCES_BY:
            try:
                form = replace(form, **{keyword.arg: ast.literal_eval(keyword.value)})
            except ValueError:
                raise CannotSplit(f"`{ast.unparse(call)}` does not write out its {keyword.arg}") from None
        if keyword.arg in {"size_average", "reduce"} or keyword.arg is None:
            raise CannotSplit(f"the reduction of `{ast.unparse(call)}` cannot be read from its arguments")
    return form


def function_form(call: ast.Call, name: str, imported: frozenset[str]) -> LossForm | None:
    """Return how the loss function that ``name`` calls reduces, if it is one."""
    base, _, function = name.rpartition(".")
    if function not in _SAMPLE_LOSSES or not (base in NAMESPACES or (not base and function in imported)):
        return None
    return _with_keywords(LossForm(name=_SAMPLE_LOSSES[function]), call)
