"""Attention exchanged for the fused kernel on live objects, and put back.

Models of transformers are switched by their own switch. A function of the notebook gets the code that its changed
source compiles to, and its own back: whoever holds the function, or a module of its class, follows.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _forward
from oomdoctor.fixes._attention_source import Fused
from oomdoctor.objects.kinds import submodules
from oomdoctor.program.magics import mask

__all__ = ["Checked", "all_of", "exchanged", "is_eager", "switched"]

_HELD: Final = "_attn_implementation_internal"
_MISSING: Final = object()
_DIMENSIONS: Final = 4
"""Batch, heads, length and features: what the kernels take."""
_SOFTMAXES: Final = frozenset({torch.ops.aten._softmax.default, torch.ops.aten._safe_softmax.default})


class Checked(TorchFunctionMode):
    """Refuses attention that fused kernels take otherwise than when it is written out, or that none of them takes.

    A mask that leaves a query nothing to attend to gives, written out, a mean of all, or what is not a number.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch.

        Raises:
            OomDoctorError: it is such attention.
        """
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        if _forward.is_shadow_run():  # there are no values to look at, nor kernels to choose from
            with _Softmax() as seen:  # type: ignore[no-untyped-call]
                result = func(*args, **kwargs)
            _refuse_written_out(args, kwargs, is_written_out=seen.ran)
            return result
        given = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        if isinstance(given, torch.Tensor) and given.dtype is torch.bool and not bool(given.any(-1).all()):
            raise OomDoctorError("a mask leaves a query nothing to attend to, which the fused kernel takes otherwise")
        _refuse_written_out(args, kwargs, is_written_out=_is_written_out(args, kwargs))
        return func(*args, **kwargs)


class _Softmax(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether a softmax runs as an operation of its own, which it does for scores that are written out."""

    ran = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran = self.ran or func in _SOFTMAXES
        return func(*args, **(kwargs or {}))


def _refuse_written_out(args: Sequence[Any], kwargs: Mapping[str, Any], *, is_written_out: bool) -> None:
    query = kwargs.get("query", args[0] if args else None)
    if is_written_out and query.dim() == _DIMENSIONS:
        drops = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        raise OomDoctorError(
            f"PyTorch has no fused kernel for this attention{' with dropout' if drops else ''} on "
            f"{query.device.type}: it writes out the scores"
        )


def _is_written_out(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether PyTorch would take attention of these arguments apart into products and a softmax.

    Source: ``_fused_sdp_choice`` in aten/src/ATen/native/transformers, which devices without kernels do not have.
    """
    try:
        return bool(torch._fused_sdp_choice(*args, **kwargs) == SDPBackend.MATH.value)
    except NotImplementedError:
        return True


def is_eager(model: Any) -> bool:
    """Tell whether a model has a switch for its attention, and it stands at eager for all or a part of it."""
    switch = inspect.getattr_static(type(model), "set_attn_implementation", None)
    return inspect.isfunction(switch) and any(held[_HELD] == "eager" for held in _configurations(model))


def _configurations(model: Any) -> list[dict[str, Any]]:
    """Return the dictionaries of all configurations that parts of a model follow."""
    found: dict[int, dict[str, Any]] = {}
    todo = [vars(part).get("config") for _, part in submodules(model)]
    while todo:
        held = getattr(todo.pop(), "__dict__", None)
        if isinstance(held, dict) and _HELD in held and id(held) not in found:
            found[id(held)] = held
            todo += held.values()
    return list(found.values())


@contextmanager
def switched(path: str, model: Any) -> Iterator[None]:
    """Turn the model's own switch to the fused kernel, and put back on exit just what that has changed.

    Raises:
        OomDoctorError: the model has no such kernel, returns its weights, or drops some that no proposal announced.
    """
    configurations = _configurations(model)
    if any(held.get("output_attentions") or held.get("_output_attentions") for held in configurations):
        raise OomDoctorError(f"{path} returns its attention weights, which fused kernels do not")
    if model.training and not _forward.active_dropout(model) and (name := _drops(configurations)) is not None:
        raise OomDoctorError(f"{path} drops attention weights ({name}): the fused kernel draws other random numbers")
    before = [(held, held.get(_HELD, _MISSING)) for held in configurations]
    try:
        try:
            model.set_attn_implementation("sdpa")
        except ValueError as error:
            raise OomDoctorError(f"{path} has no fused attention: {error}") from error
        if is_eager(model):
            raise OomDoctorError(f"{path} keeps its eager attention: it cannot be switched")
        yield
    finally:
        for held, value in before:
            held[_HELD] = value


def _drops(configurations: list[dict[str, Any]]) -> str | None:
    """Return the setting of a probability to drop something, which may be of a function and not of a layer."""
    for held in configurations:
        for name, value in held.items():
            if ("drop" in name or name == "attn_pdrop") and isinstance(value, float) and value > 0:
                return name
    return None


@contextmanager
def exchanged(namespace: dict[str, Any], models: list[Any], made: Fused) -> Iterator[None]:
    """Give the live function the code of the changed source; its own is put back on exit.

    Raises:
        OomDoctorError: the function is not the one that the cell defines, or draws what no proposal announced.
    """
    function = _found(namespace, made.function)
    old, new = (_code(text, made) for text in (made.parsed.masked.text, mask(made.module.code).text))
    if function is None or old is None or new is None or not _same(function.__code__, old):
        raise OomDoctorError(f"`{made.function}` is not as cell {made.cell.number} defines it: it is left as it is")
    if made.drops and any(model.training and not _forward.active_dropout(model) for model in models):
        raise OomDoctorError(f"`{made.function}` drops attention weights: the fused kernel draws other random numbers")
    if made.home.partition(".")[0] not in function.__globals__:
        raise OomDoctorError(f"`{made.function}` does not see `{made.home}`: it is left as it is")
    before = function.__code__
    if new.co_freevars != before.co_freevars:
        raise OomDoctorError(f"`{made.function}` holds variables of another function: it is left as it is")
    # The file stays that of the cell, so that tracebacks find it.
    function.__code__ = mine = new.replace(co_filename=before.co_filename)
    try:
        yield
    finally:
        if function.__code__ is mine:
            function.__code__ = before


def _found(namespace: dict[str, Any], name: str) -> FunctionType | None:
    owner, _, method = name.rpartition(".")
    held = namespace.get(owner) if owner else None
    found = vars(held).get(method) if isinstance(held, type) else namespace.get(name)
    return found if isinstance(found, FunctionType) else None


def _code(text: str, made: Fused) -> CodeType | None:
    """Return the code of the function in a cell, compiled and not run."""
    todo = [compile(text, "<cell>", "exec", dont_inherit=True)]
    found = None
    while todo:
        code = todo.pop()
        inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        found = next((one for one in inner if one.co_qualname == made.function), found)
        todo += inner
    return found


def _same(live: CodeType, text: CodeType) -> bool:
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars")
    return all(getattr(live, name) == getattr(text, name) for name in names) and _constants(live) == _constants(text)


def _constants(code: CodeType) -> list[str]:
    return [repr(constant) for constant in code.co_consts if not isinstance(constant, CodeType)]


@contextmanager
def all_of(contexts: list[Any]) -> Iterator[None]:
    """Enter each of ``contexts`` and the check of what attention is given."""
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        stack.enter_context(Checked())
        yield
