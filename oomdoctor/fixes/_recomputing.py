"""Whether the cells recompute activations already, as their calls tell: words in comments and imports alone do not.

Limits: a call is taken to be made, wherever it stands, and what an imported module does is not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Final

from oomdoctor.model.session import Cells
from oomdoctor.program.magics import parsed
from oomdoctor.program.names import call_name, imported

__all__ = ["SWITCHES", "recomputes"]

SWITCHES: Final = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
"""The model's own switch: the name of transformers since 5.23, where the older one warns and is gone in 6."""

_HOME: Final = "torch.utils.checkpoint"
_METHODS: Final = frozenset({*SWITCHES, "set_grad_checkpointing"})


def recomputes(cells: Cells) -> bool:
    """Return whether a cell uses what ``torch.utils.checkpoint`` has, or calls a model's switch for it."""
    trees = [tree for cell in cells.history if (tree := parsed(cell.source)) is not None]
    # Names are of one namespace: one cell imports what another one calls.
    aliases = dict(alias for tree in trees for node in ast.walk(tree) for alias in imported(node))
    return any(_uses(node, aliases) for tree in trees for node in ast.walk(tree))


def _uses(node: ast.AST, aliases: dict[str, str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        return not _turns_off(node.args)
    if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
        return False
    root, dot, rest = call_name(node).partition(".")
    return f"{aliases.get(root, root)}{dot}{rest}".startswith(f"{_HOME}.")


def _turns_off(args: Sequence[ast.expr]) -> bool:
    return bool(args) and isinstance(args[0], ast.Constant) and args[0].value is False
