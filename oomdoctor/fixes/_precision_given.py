"""Whether what a model is given is a floating-point tensor, by what the census saw of it and how the cells write it."""

from __future__ import annotations

import ast
from typing import Final

from oomdoctor.fixes._seen import root, tensors
from oomdoctor.model.absence import Refused
from oomdoctor.model.evidence import Evidence
from oomdoctor.model.memory import Role
from oomdoctor.program import words
from oomdoctor.program.book import Book
from oomdoctor.program.settings import FUNCTIONS, default_of, parameters

__all__ = ["is_floating_tensor"]

_MOVES: Final = frozenset({"to", "cuda", "cpu", "float"})
"""Methods that are there where ``to`` is."""
_TENSORS: Final = (words.MOVES | words.CASTS | words.SHAPES | {"add", "detach", "div", "mul", "repeat", "sub"}) - {
    *("chunk", "split", "tensor_split", "unbind", "type"),
}
"""Methods of a tensor that give one."""
_MAKERS: Final = frozenset(
    f"torch.{name}" for name in ("as_tensor", "cat", "from_numpy", "ones", "rand", "randn", "stack", "tensor", "zeros")
)
_OTHERS: Final = (ast.List, ast.Tuple, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Constant)
"""What is written so is no tensor."""


def is_floating_tensor(node: ast.expr, book: Book, evidence: Evidence) -> bool | Refused:
    """Tell whether an argument is floating point; where it is, it is a tensor and has ``to``."""
    if isinstance(node, ast.Constant):
        return False
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    typed = [held for held in evidence.census.holdings if held.dtype]
    # In a loop that does not train, the census does not know the batch from other tensors of the user's.
    named = [held for held in typed if root(held) in names]
    seen = named or [held for held in typed if held.role is Role.BATCH]
    kinds = {str(held.dtype).removeprefix("torch.").startswith(("float", "bfloat")) for held in seen}
    if len(kinds) != 1:
        return Refused(f"of which type `{ast.unparse(node)}` is was not seen")
    if kinds == {False}:
        return False
    if isinstance(node, ast.Starred):
        return Refused(f"`{ast.unparse(node)}` would have to be cast, one by one")
    if not _is_tensor(node, tensors(evidence), book):
        return Refused(f"the model is given `{ast.unparse(node)}`, which was not seen to be a tensor at every call")
    return True


def _is_tensor(node: ast.expr, held: frozenset[str], book: Book) -> bool:
    """Whether ``node`` gives a tensor, where ``held`` are expressions for those that the census met."""
    if isinstance(node, ast.Name):
        return node.id in held and not _is_ever_another(node.id, book)
    if ast.unparse(node) in held:
        return True
    if isinstance(node, ast.Call):
        if ast.unparse(node.func) in _MAKERS:
            return True
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _TENSORS:
            return False
        return node.func.attr in _MOVES or _is_tensor(node.func.value, held, book)
    if isinstance(node, ast.BinOp):
        return _is_tensor(node.left, held, book) or _is_tensor(node.right, held, book)
    return isinstance(node, ast.Subscript | ast.UnaryOp) and _is_tensor(
        node.value if isinstance(node, ast.Subscript) else node.operand, held, book
    )


def _is_ever_another(name: str, book: Book) -> bool:
    """Whether the cells bind ``name`` to None, a number or a container somewhere, or let it be that by default."""
    for page in book.pages:
        for node in ast.walk(page.tree):
            if isinstance(node, FUNCTIONS) and name in parameters(node):
                if isinstance(default_of(node, name), _OTHERS):
                    return True
            elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and isinstance(node.value, _OTHERS):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    return True
    return False
