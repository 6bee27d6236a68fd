"""Modes of torch's that a cell entered by hand and did not leave: taken off their stacks again, or told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oomdoctor.objects.homes import is_installed, is_ours
from oomdoctor.objects.kinds import module_of
from oomdoctor.objects.recipes import living, weak

__all__ = ["Modes"]


class Modes:
    """The modes that were entered when it was taken: those of functions, and those of the dispatcher.

    Args:
        torch: the module.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._before = [[weak(mode) for mode in stack] for stack in self._stacks()]
        self._infers = torch.is_inference_mode_enabled()

    def _stacks(self) -> Iterator[list[Any]]:
        """Yield the modes on each stack, the last one entered at its end.

        The default device is a mode too, and a setting of its own.
        """
        core = self._torch._C
        default = getattr(getattr(self._torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
        functions = [core._get_function_stack_at(at) for at in range(core._len_torch_function_stack())]
        yield [mode for mode in functions if mode is not default]
        yield [core._get_dispatch_stack_at(at) for at in range(core._len_torch_dispatch_stack())]

    def _entered(self) -> Iterator[tuple[list[Any], list[Any], list[Any]]]:
        """Yield of each stack what there was before, what is left of it below, and what was entered above that."""
        for stack, held in zip(self._stacks(), self._before, strict=True):
            before = [living(one) for one in held]
            kept = len(stack)
            while kept and not is_ours(module_of(type(stack[kept - 1]))) and not _is_in(stack[kept - 1], before):
                kept -= 1
            yield before, stack[:kept], stack[kept:]

    def lost(self) -> Iterator[str]:
        """Yield a sentence for what cannot be entered or left in its place."""
        for before, below, _ in self._entered():
            of_users = [mode for mode in below if not is_ours(module_of(type(mode)))]
            expected = [mode for mode in before if not is_ours(module_of(type(mode)))]
            if len(of_users) != len(expected) or not all(map(_is_in, of_users, [expected] * len(of_users))):
                yield "a mode of torch's that was entered before was left, or lies below one that was not"
        if self._torch.is_inference_mode_enabled() != self._infers:
            yield "the inference mode was entered or left, and stays so"

    def restore(self) -> None:
        """Leave the modes that were entered last."""
        from torch.overrides import TorchFunctionMode
        from torch.utils._python_dispatch import TorchDispatchMode

        bases: tuple[Any, Any] = (TorchFunctionMode, TorchDispatchMode)
        for base, (_, _, above) in zip(bases, list(self._entered()), strict=True):
            for mode in reversed(above):
                # A program's own way out may do more than to leave, and a device's expects another way in. But a
                # library's mode of the dispatcher has more to put back.
                is_librarys = base is TorchDispatchMode and is_installed(module_of(type(mode)))
                (type(mode) if is_librarys else base).__exit__(mode, None, None, None)


def _is_in(value: Any, items: list[Any]) -> bool:
    return any(value is item for item in items)
