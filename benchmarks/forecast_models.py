"""The models that the forecast is measured on: ten families, and the other recurrent layers.

Each is sized so that three steps take seconds on two cores, but for GPT-2 small, which is what it is. Images and token
ids are drawn; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["FAMILIES", "Family", "Phase", "load_libraries"]


@dataclass(frozen=True, slots=True)
class Phase:
    """One update of a step: the optimizer that makes it, and the loss as an expression of ``x`` and ``y``."""

    optimizer: str
    loss: str


_CLASSES: Final = (Phase("optimizer", "F.cross_entropy(model(x), y)"),)
_DENSE: Final = (Phase("optimizer", "F.cross_entropy(model(x).flatten(0, 1), y.flatten())"),)
_TRANSFORMERS: Final = (Phase("optimizer", "model(x, labels=y).loss"),)


@dataclass(frozen=True, slots=True)
class Family:
    """A model and how it is trained.

    Attributes:
        make: makes the modules by name; ``model`` is the one that the default optimizer trains.
        data: makes two tensors of so many samples.
        batch: samples of a batch; it can be cut into four.
        steps: batches of the cell.
    """

    make: Callable[[bool], dict[str, nn.Module]]
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    batch: int
    phases: tuple[Phase, ...] = _CLASSES
    steps: int = 3


class Blocks(nn.Module):
    """Layers in a row, those in the middle checkpointed where asked for."""

    def __init__(self, first: nn.Module, middle: list[nn.Module], last: nn.Module, *, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = first, nn.ModuleList(middle), last
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last layer makes of it."""
        x = self.first(x)
        for block in self.middle:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.last(x)


class Residual(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.one, self.norm_one = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.two, self.norm_two = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.short = nn.Identity() if (inner, stride) == (outer, 1) else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both ways."""
        inside = self.norm_two(self.two(nn.functional.relu(self.norm_one(self.one(x)))))
        return nn.functional.relu(inside + self.short(x))


def _double(inner: int, outer: int) -> nn.Sequential:
    layers = (nn.Conv2d(size, outer, 3, 1, 1) for size in (inner, outer))
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.BatchNorm2d(outer), nn.ReLU(inplace=True))))


class UNet(nn.Module):
    """Three levels down and up again."""

    def __init__(self, width: int = 16, *, checkpointed: bool) -> None:
        super().__init__()
        sizes = [width << level for level in range(4)]
        self.down = nn.ModuleList(map(_double, [3, *sizes[:-1]], sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in reversed(sizes[:-1]))
        self.merge = nn.ModuleList(_double(2 * size, size) for size in reversed(sizes[:-1]))
        self.head, self.checkpointed = nn.Conv2d(width, 4, 1), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score per class and pixel."""
        kept: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = self._run(block, nn.functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = self._run(merge, torch.cat([up(x), kept.pop()], 1))
        return self.head(x)

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)


class Sequence(nn.Module):
    """A recurrent layer, and its output alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output at all steps."""
        return self.layer(x)[0]


def _mlp(checkpointed: bool) -> dict[str, nn.Module]:
    def hidden() -> nn.Module:
        return nn.Sequential(nn.Linear(768, 768), nn.BatchNorm1d(768), nn.ReLU(), nn.Dropout(0.1))

    middle = [hidden() for _ in range(5)]
    return {"model": Blocks(nn.Linear(784, 768), middle, nn.Linear(768, 10), checkpointed=checkpointed)}


def _resnet(checkpointed: bool) -> dict[str, nn.Module]:
    stem = nn.Sequential(nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    middle: list[nn.Module] = [Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2), Residual(128, 128, 1)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100))
    return {"model": Blocks(stem, middle, head, checkpointed=checkpointed)}


def _unet(checkpointed: bool) -> dict[str, nn.Module]:
    return {"model": UNet(checkpointed=checkpointed)}


def _dcgan(checkpointed: bool) -> dict[str, nn.Module]:
    def rise(inner: int, outer: int, stride: int) -> nn.Module:
        layer = nn.ConvTranspose2d(inner, outer, 4, stride, stride - 1, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outer), nn.ReLU(inplace=True))

    def fall(inner: int, outer: int) -> nn.Module:
        layer = nn.Conv2d(inner, outer, 4, 2, 1, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outer), nn.LeakyReLU(0.2, inplace=True))

    paint = nn.Sequential(nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False), nn.Tanh())
    look = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1, bias=False), nn.LeakyReLU(0.2))
    judge = nn.Sequential(nn.Conv2d(256, 1, 4, bias=False), nn.Flatten())
    rises = [rise(256, 128, 2), rise(128, 64, 2), rise(64, 32, 2)]
    falls = [fall(32, 64), fall(64, 128), fall(128, 256)]
    return {
        "model": Blocks(rise(64, 256, 1), rises, paint, checkpointed=checkpointed),
        "critic": Blocks(look, falls, judge, checkpointed=checkpointed),
    }


_DCGAN: Final = (
    Phase("critic_optimizer", "F.softplus(-critic(x)).mean() + F.softplus(critic(model(y).detach())).mean()"),
    Phase("optimizer", "F.softplus(-critic(model(y))).mean()"),
)


def _recurrent(kind: str) -> Callable[[bool], dict[str, nn.Module]]:
    def make(checkpointed: bool) -> dict[str, nn.Module]:
        layers = [
            Sequence(getattr(nn, kind)(128, 256, 2, batch_first=True, dropout=0.1)),
            Sequence(getattr(nn, kind)(256, 128, bidirectional=True, batch_first=True)),
        ]
        return {"model": Blocks(nn.Embedding(2000, 128), layers, nn.Linear(256, 2000), checkpointed=checkpointed)}

    return make


def _transformers(name: str, config: str, **settings: Any) -> Callable[[bool], dict[str, nn.Module]]:
    def make(checkpointed: bool) -> dict[str, nn.Module]:
        import transformers

        model = getattr(transformers, name)(getattr(transformers, config)(**settings))
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return {"model": model}

    return make


def _images(size: int, classes: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda count: (torch.randn(count, 3, size, size), torch.randint(0, classes, (count,)))


def _tokens(length: int, words: int, *targets: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    shape = targets or (length,)
    return lambda count: (torch.randint(1, words, (count, length)), torch.randint(1, words, (count, *shape)))


_BERT: Final = {"num_hidden_layers": 4, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
_VIT: Final = {**_BERT, "image_size": 128, "num_labels": 100}
_LLAMA: Final = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8}
_T5: Final = {"d_model": 256, "d_ff": 1024, "d_kv": 32, "num_layers": 3, "num_heads": 8}
_START: Final = {"decoder_start_token_id": 0, "pad_token_id": 0}

FAMILIES: Final[dict[str, Family]] = {
    "MLP": Family(_mlp, lambda count: (torch.randn(count, 784), torch.randint(0, 10, (count,))), 512),
    "ResNet": Family(_resnet, _images(128, 100), 8),
    "U-Net": Family(_unet, lambda count: (torch.randn(count, 3, 64, 64), torch.randint(0, 4, (count, 64, 64))), 8),
    "DCGAN": Family(_dcgan, lambda count: (torch.randn(count, 3, 64, 64), torch.randn(count, 64, 1, 1)), 16, _DCGAN),
    "LSTM": Family(_recurrent("LSTM"), _tokens(48, 2000), 16, _DENSE),
    "GRU": Family(_recurrent("GRU"), _tokens(32, 2000), 16, _DENSE),
    "RNN": Family(_recurrent("RNN"), _tokens(32, 2000), 16, _DENSE),
    "GPT-2 small": Family(_transformers("GPT2LMHeadModel", "GPT2Config"), _tokens(32, 50257), 4, _TRANSFORMERS, 2),
    "BERT": Family(
        _transformers("BertForSequenceClassification", "BertConfig", num_labels=4, vocab_size=8000, **_BERT),
        lambda count: (torch.randint(0, 8000, (count, 64)), torch.randint(0, 4, (count,))),
        *(8, _TRANSFORMERS),
    ),
    "ViT": Family(_transformers("ViTForImageClassification", "ViTConfig", **_VIT), _images(128, 100), 8, _TRANSFORMERS),
    "Llama": Family(
        _transformers("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=4, vocab_size=4000, **_LLAMA),
        *(_tokens(96, 4000), 4, _TRANSFORMERS),
    ),
    "T5": Family(
        _transformers("T5ForConditionalGeneration", "T5Config", vocab_size=4000, **_T5, **_START),
        *(_tokens(64, 4000, 32), 8, _TRANSFORMERS),
    ),
}


def load_libraries() -> None:
    """Load what the cases load, so that processes forked from this one need not."""
    import_module("torch._dynamo")
    for name in ("gpt2", "bert", "vit", "llama", "t5"):
        import_module(f"transformers.models.{name}.modeling_{name}")
