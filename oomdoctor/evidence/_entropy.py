"""Where the failing cell takes a cross-entropy, and over how many classes its models predict.

A cross-entropy is told by the function's name, or by what is called being a loss of the namespace of that class. How
many classes there are is read from the layers: outputs of a model's last linear layer, and where those are as wide as
an embedding, by whose rows they may be multiplied, the rows of that.
Limits: a loss that a library takes inside of a model's forward is not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from oomdoctor.model.code import LossFacts
from oomdoctor.objects.kinds import plain_dict, submodules
from oomdoctor.program.definitions import Program, Scope
from oomdoctor.program.ground import Ground
from oomdoctor.program.names import call_name, own_nodes

__all__ = ["classes", "cross_entropies"]


def cross_entropies(
    program: Program, ground: Ground, losses: Iterable[LossFacts]
) -> tuple[tuple[int, int, str, str], ...]:
    """Return ``(cell, line, what is called, the loss or function that it stands for)`` of each, in their order."""
    known = {loss.path for loss in losses if loss.type_name == "CrossEntropyLoss"}
    found = [place for scope in ground.reach for place in _of_scope(program, scope, known)]
    return tuple(sorted(dict.fromkeys(found)))


def _of_scope(program: Program, scope: Scope, known: set[str]) -> Iterator[tuple[int, int, str, str]]:
    stands_for = dict(program.arguments.get(scope.function.name, ())) if scope.function else {}
    for node in own_nodes(scope.body):
        name = call_name(node) if isinstance(node, ast.Call) else ""
        stands = stands_for.get(name, name)
        if isinstance(node, ast.Call) and name and (stands in known or stands.rpartition(".")[2] == "cross_entropy"):
            yield scope.cell, node.lineno, name, stands


def classes(modules: Iterable[tuple[str, Any]]) -> tuple[int, ...]:
    """Return the numbers of classes that models may predict, sorted."""
    found: set[int] = set()
    for path, root in modules:
        last: int | None = None
        embeddings: list[tuple[int, int]] = []
        for _, part in submodules(root, path):
            own = plain_dict(part) or {}
            outputs, rows, width = (own.get(name) for name in ("out_features", "num_embeddings", "embedding_dim"))
            last = outputs if type(outputs) is int else last
            if type(rows) is int and type(width) is int:
                embeddings.append((rows, width))
        # Rows of an embedding that nothing of its width comes back to are words or positions that are read.
        found |= {rows for rows, width in embeddings if last in (None, width)}
        found |= {last} if last is not None else set()
    return tuple(sorted(found))
