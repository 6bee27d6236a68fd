"""Watches blocks that changed source recomputes by plain ``checkpoint``, which asks nothing before it does.

What ``StateWatch`` finds out when a block is recomputed live is found out here from its forward alone: hooks for all
modules look at those whose ``forward`` is a ``partial`` of ``checkpoint``, those that the failing cell makes included.
The blocks are not touched, so that nothing of the watch stays in what a user saves. Limits: arguments by keyword.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from oomdoctor.errors import OomDoctorError
from oomdoctor.fixes import _forward
from oomdoctor.objects.kinds import submodules

__all__ = ["watched"]


@contextmanager
def watched(models: Iterable[tuple[str, Any]]) -> Iterator[None]:
    """Look at every forward that is going to be recomputed while the body runs.

    Raises:
        OomDoctorError: from such a forward, where running it again would do something twice or find it otherwise.
    """
    known = [(name, part) for path, model in models for name, part in submodules(model, path)]
    paths = {id(part): name for name, part in known}
    own = {id(part): _parameters(part) for _, part in known}
    running: dict[int, _Marks] = {}

    def before(module: Any, args: Any) -> None:
        if not _is_recomputed(module) or not torch.is_grad_enabled():
            return
        path = paths.get(id(module), type(module).__name__)
        for name, part in submodules(module, path):
            held = part._parameters.values()
            if own.get(id(part), _parameters(part)) != _parameters(part) or any(map(_is_exchanged, held)):
                raise OomDoctorError(f"{name} cannot be recomputed: its parameters are exchanged for a call")
        running[id(module)] = _Marks(path, module, args)

    def after(module: Any, args: Any, output: Any) -> None:
        if (marks := running.pop(id(module), None)) is not None and (what := marks.changed(args)) is not None:
            path = paths.get(id(module), type(module).__name__)
            raise OomDoctorError(
                f"{path} cannot be recomputed: its forward changes {what}, which would then happen twice"
            )

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Marks:
    """What a forward that is run again must leave as it was."""

    def __init__(self, path: str, module: Any, args: tuple[Any, ...]) -> None:
        self._watch, self._drawn, self._versions = (
            _forward.StateWatch(path, module),
            _forward.host_marks(),
            _versions(args),
        )
        self._statistics = [
            (f"{name}.{key}", buffer, buffer.clone())
            for name, part in (() if _forward.is_shadow_run() else submodules(module, path))
            for key, buffer in _forward.running_statistics(part)
        ]

    def changed(self, args: tuple[Any, ...]) -> str | None:
        """Return what is not as it was before the forward, None if all is."""
        if self._drawn != _forward.host_marks():
            return "Python's or NumPy's random numbers"
        if self._versions != _versions(args):
            return "its input in place"
        return self._watch.changed() or next(
            (name for name, buffer, before in self._statistics if not torch.equal(buffer, before)), None
        )


def _is_recomputed(module: Any) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is checkpoint


def _parameters(module: Any) -> list[int]:
    return [id(parameter) for parameter in module._parameters.values()]


def _is_exchanged(parameter: Any) -> bool:
    return parameter is not None and not isinstance(parameter, torch.nn.Parameter)


def _versions(args: tuple[Any, ...]) -> list[int]:
    return [one._version for one in args if isinstance(one, torch.Tensor) and not one.is_inference()]
