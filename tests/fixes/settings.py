"""What the cross-cutting tests of the fixes cannot derive from the fixes: one entry each, and the reasons.

A fix without an entry runs through the same checks; its refusals are then taken as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import torch

__all__ = ["DEFAULT", "SETTINGS", "Settings", "runs_in_bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is right for one fix.

    Attributes:
        refuses: part of a reason, and the families that are rightly refused for it: neither the patch nor the live
            form is made for them. Every other family has to be healed. None takes refusals as they are.
        heals: families that have to be healed, where it is shorter to name them than all others; of those, refusals are
            taken as they are.
        shown: families whose pair with the fix ``make test`` takes: most unlike ones that are healed, and one that is
            refused when it is tried; ``make test-all`` takes all pairs.
        elsewhere: why no family can show what it does, so that it may refuse them all.
        tolerance: by family, where more than the fix's own tolerance is right.
        stays: patterns of paths that the live form changes for good, on purpose.
        live_frees_before: the live form frees what earlier cells left; what the failing cell goes on to gather is
            changed by the patch alone.
    """

    refuses: Mapping[str, tuple[str, ...]] | None = None
    heals: tuple[str, ...] = ()
    shown: tuple[str, ...] = ("mlp", "gpt")
    elsewhere: str = ""
    tolerance: Mapping[str, float] = field(default_factory=dict)
    stays: tuple[str, ...] = ()
    live_frees_before: bool = False


def runs_in_bfloat16(layer: torch.nn.Module, given: torch.Tensor) -> bool:
    """Return whether this processor has a kernel for it."""
    with suppress(RuntimeError), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        layer(given)
        return True
    return False


DEFAULT: Final = Settings()

_NO_LEAK: Final = (
    *("mlp", "cnn", "unet", "lstm", "gpt", "vit", "gan", "vae", "encoder_decoder", "transformers", "contrastive"),
    *("attention", "evaluation", "prediction", "retained", "stateful", "wide", "zeroed"),
)
"""Families that keep no tensor of an earlier step with its graph."""

_HOST_ONLY: Final = Settings(elsewhere="it saves memory of the host, and the families run out of a device's")
_ONE_PROCESS: Final = Settings(elsewhere="it is for several ranks, and the families train in one process")

_OF_JITTOR: Final = Settings(elsewhere="it is for Jittor's programs, and the families are torch's")

SETTINGS: Final[Mapping[str, Settings]] = {
    **dict.fromkeys(("jittor_sync", "jittor_release", "jittor_amp"), _OF_JITTOR),
    **dict.fromkeys(("fewer_workers", "prefetch", "pin_memory_off", "persistent_workers_off"), _HOST_ONLY),
    **dict.fromkeys(("sharing_strategy", "memmap_array", "narrow_dtype"), _HOST_ONLY),
    **dict.fromkeys(("sparse_dummies", "category_columns", "narrow_columns"), _HOST_ONLY),
    **dict.fromkeys(("ddp_settings", "dp_to_ddp", "fsdp2", "zero_optimizer"), _ONE_PROCESS),
    "autocast": Settings(
        heals=(
            *("mlp", "cnn", "gpt", "vit", "encoder_decoder", "transformers", "contrastive"),
            # Of LSTMs oneDNN has a kernel in bfloat16 on some processors alone.
            *(("lstm",) if runs_in_bfloat16(torch.nn.LSTM(2, 2), torch.zeros(2, 2, 2)) else ()),
        )
    ),
    "batch_to_device": Settings(elsewhere="on the virtual accelerator the host's memory is the device's"),
    "checkpoint_blocks": Settings(
        refuses={
            "no model was found with parts": ("vae", "stateful"),
            "in the optimizer's step": ("wide",),
            "gradients are off": ("prediction",),
        },
        shown=("cnn", "gpt"),
    ),
    "chunked_forward": Settings(
        shown=("mlp", "gan", "lstm"),
        refuses={
            "statistics over the whole batch": ("cnn", "unet"),
            # Its state has the batch in dimension 1.
            "which is not split": ("lstm",),
            "which is not made of rows for the samples": ("gpt", "stateful", "transformers"),
            "in the optimizer's step": ("wide",),
        },
    ),
    "chunked_inference": Settings(heals=("prediction",), shown=("prediction",)),
    "chunked_loss": Settings(heals=("gpt", "retained"), shown=("retained",)),
    "clear_output_cache": Settings(elsewhere="the cells are run without IPython, so there is no output cache"),
    "detach_history": Settings(
        refuses={"it is certain that no gradient is taken": _NO_LEAK},
        live_frees_before=True,
        shown=("history", "stateful"),
    ),
    "detach_state": Settings(heals=("stateful",), shown=("stateful",)),
    "drop_retain_graph": Settings(heals=("retained",), shown=("retained",)),
    "dynamic_quantization": Settings(elsewhere="its kernels are for the CPU, and the families run on a device"),
    "expandable_segments": Settings(elsewhere="it is a setting of CUDA's allocator"),
    "free_stale": Settings(elsewhere="no family builds its model twice"),
    "half_weights": Settings(heals=("prediction",), shown=("prediction",)),
    "library_slices": Settings(elsewhere="no family calls a pipeline of a library"),
    "library_tiles": Settings(elsewhere="no family calls a pipeline of a library"),
    "lighter_optimizer": Settings(heals=("mlp", "gpt", "gan", "transformers", "wide"), shown=("mlp", "wide")),
    "load_mmap": Settings(elsewhere="no family reads a checkpoint"),
    "micro_batch": Settings(
        # AdamW moves biases of keys, whose gradients are rounding alone, by its learning rate: the trial, whose control
        # does the same, compares the rest.
        tolerance={"transformers": 2.0},
        shown=("mlp", "gan"),
        refuses={
            "normalises over the batch": ("cnn", "unet"),
            "differs by": ("contrastive",),
            "no backward pass": ("evaluation", "prediction", "stateful"),
            # A second backward may follow, whose share is not known.
            "backward is called with arguments": ("retained",),
            "in the optimizer's step": ("wide",),
        },
    ),
    "no_grad_eval": Settings(heals=("evaluation", "history", "stateful"), shown=("evaluation", "stateful")),
    "offload_optimizer_state": Settings(elsewhere="on the virtual accelerator the host's memory is the device's"),
    "offload_predictions": Settings(elsewhere="on the virtual accelerator the host's memory is the device's"),
    "optimizer_8bit": Settings(elsewhere="its optimizers are made for CUDA devices"),
    "optimizer_in_backward": Settings(heals=("history",), shown=("history",)),
    "optimizer_foreach_off": Settings(heals=("wide",), shown=("wide",)),
    "release_cache": Settings(elsewhere="the families use no other allocator that PyTorch's cache could starve"),
    "release_traceback": Settings(elsewhere="each family fails once: there is no earlier failure to let go of"),
    "save_on_cpu": Settings(
        refuses={"gradients are off": ("prediction",), "in the optimizer's step": ("wide",)},
        shown=("lstm", "vae"),
    ),
    "sdpa_attention": Settings(heals=("attention",), shown=("attention",)),
    "set_to_none": Settings(heals=("zeroed",), shown=("zeroed",)),
    "smaller_batch": Settings(
        heals=("mlp", "cnn", "gpt", "gan", "encoder_decoder", "contrastive"), shown=("mlp", "gan")
    ),
    "smaller_image": Settings(elsewhere="the families' images are as small as images get"),
}
