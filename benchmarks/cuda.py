# ruff: noqa: E501  the programs are as long as their users write them
"""How far forecasts are from what PyTorch's CUDA allocator then counts: peaks allocated and reserved, on three cards.

    .venv-cuda/bin/python benchmarks/cuda.py [--card 8.0 ...] [--write] [NAME ...]
    python benchmarks/cuda.py --here [--write] [NAME ...]

Each program is forecast in a process whose device is in use, then run there, and held against
``torch.cuda.max_memory_allocated()`` and ``max_memory_reserved()``. Without ``--here``, on the stub of NVIDIA's
libraries (``make test-cuda`` builds it): there the allocator and the host code of every operator are PyTorch's own, and
cards are told apart by their capability and multiprocessors. The stub's cuDNN asks for no workspace and its recurrent
layers keep what its author guessed, so that the last columns of those rows say little. With ``--here``, on this
machine's GPU, and with programs of real size beside the small ones.

``--write`` keeps the table in ``results/cuda.txt``, of this machine's GPU in ``results/cuda_here.txt``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "cuda.txt"
ON_A_GPU = RESULTS.with_name("cuda_here.txt")
CARDS = {
    "7.5": ("T4", 40, ""),
    "8.0": ("A100", 108, ""),
    "9.0": ("H100", 132, ""),
    "8.0x": ("A100, expandable", 108, "x"),
}
HERE = {"here": ("", 0, ""), "herex": (", expandable", 0, "x")}

_COMMON = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
"""
_TRAIN = """
optimizer = OPTIMIZER
for _ in range(3):
    a, b = x.cuda(), y.cuda()
    loss = F.cross_entropy(model(a).flatten(0, -2), b.flatten())
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_MIXED = """
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda", enabled=SCALES)
for _ in range(3):
    a, b = x.cuda(), y.cuda()
    with torch.autocast("cuda", dtype=torch.DTYPE):
        loss = F.cross_entropy(model(a).flatten(0, -2), b.flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer); scaler.update(); optimizer.zero_grad()
"""
_TOKENS = "x, y = torch.randint(0, 1000, (2, 16, 128))\n"
_ENCODER = (
    """
model = nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(nn.TransformerEncoderLayer(
    256, 8, 1024, dropout=DROPOUT, batch_first=True), 4), nn.Linear(256, 1000)).cuda()
"""
    + _TOKENS
)
_GPT = (
    """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2, self.qkv, self.out = nn.LayerNorm(256), nn.LayerNorm(256), nn.Linear(256, 768), nn.Linear(256, 256)
        self.mlp = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    def attend(self, x):
        q, k, v = (t.unflatten(-1, (8, 32)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
    def forward(self, x):
        x = x + self.attend(x)
        return x + self.mlp(self.ln2(x))
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(1000, 256), nn.Embedding(512, 256)
        self.blocks, self.norm, self.head = nn.ModuleList(Block() for _ in range(4)), nn.LayerNorm(256), nn.Linear(256, 1000)
    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if RECOMPUTES else block(h)
        return self.head(self.norm(h))
model = GPT().cuda()
"""
    + _TOKENS
)
_CNN = """
def layer(i, o): return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
model = nn.Sequential(layer(3, 32), nn.MaxPool2d(2), layer(32, 64), layer(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
x, y = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
"""
_RESNET = """
class Residual(nn.Module):
    def __init__(self, i, o, s):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True), nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o))
        self.skip = nn.Sequential(nn.Conv2d(i, o, 1, s, bias=False), nn.BatchNorm2d(o)) if s > 1 else nn.Identity()
    def forward(self, x): return F.relu(self.body(x) + self.skip(x))
model = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    Residual(64, 64, 1), Residual(64, 128, 2), Residual(128, 256, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)).cuda()
x, y = torch.randn(16, 3, 96, 96), torch.randint(0, 10, (16,))
"""
_LSTM = (
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__(); self.e = nn.Embedding(1000, 128); self.r = nn.KIND(128, 256, 2, batch_first=True); self.h = nn.Linear(256, 1000)
    def forward(self, x): return self.h(self.r(self.e(x))[0])
model = Net().cuda()
"""
    + _TOKENS
)
_MLP = """
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
x, y = torch.randn(4096, 512), torch.randint(0, 10, (4096,))
"""
_LLAMA = (
    """
import transformers
config = transformers.LlamaConfig(vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=3,
    num_attention_heads=8, num_key_value_heads=KV, attn_implementation="ATTENTION")
model = transformers.LlamaForCausalLM(config).cuda()
"""
    + _TOKENS
)
_LIBRARY = _TRAIN.replace("F.cross_entropy(model(a).flatten(0, -2), b.flatten())", "model(input_ids=a, labels=b).loss")
_BERT = (
    """
import transformers
model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=1000, hidden_size=256, num_hidden_layers=3,
    num_attention_heads=8, intermediate_size=1024)).cuda()
"""
    + _TOKENS
)
_GAN = """
G = nn.Sequential(nn.ConvTranspose2d(64, 128, 4), nn.BatchNorm2d(128), nn.ReLU(), nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()).cuda()
D = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.LeakyReLU(0.2), nn.Conv2d(128, 1, 4)).cuda()
x = torch.randn(128, 3, 16, 16)
"""
_GAN_STEP = """
og, od = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
for _ in range(3):
    real = x.cuda(); fake = G(torch.randn(128, 64, 1, 1, device="cuda"))
    od.zero_grad()
    ld = F.binary_cross_entropy_with_logits(D(real).flatten(), torch.ones(128, device="cuda")) + F.binary_cross_entropy_with_logits(D(fake.detach()).flatten(), torch.zeros(128, device="cuda"))
    ld.backward(); od.step(); og.zero_grad()
    lg = F.binary_cross_entropy_with_logits(D(fake).flatten(), torch.ones(128, device="cuda"))
    lg.backward(); og.step()
"""
_UNET_STEP = _TRAIN.replace("F.cross_entropy(model(a).flatten(0, -2), b.flatten())", "F.mse_loss(model(a), b)")
_AE = """
model = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.GroupNorm(8, 64), nn.SiLU(),
    nn.Upsample(scale_factor=2), nn.Conv2d(64, 32, 3, 1, 1), nn.SiLU(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(32, 3, 3, 1, 1)).cuda()
x = torch.randn(16, 3, 96, 96); y = x.clone()
"""
_GENERATION = """
tokens = x[:4, :32].cuda()
with torch.no_grad():
    out = model.generate(tokens, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None)
"""
_LOOP_OF_TOKENS = """
model.eval()
tokens = x[:8, :64].cuda()
with torch.inference_mode():
    for _ in range(16):
        logits = model(tokens)[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
"""
ADAMW, SGD = (
    "torch.optim.AdamW(model.parameters(), lr=1e-3)",
    "torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)",
)


def _train(optimizer: str = ADAMW, cell: str = _TRAIN) -> str:
    return cell.replace("OPTIMIZER", optimizer)


def _mixed(dtype: str) -> str:
    return _MIXED.replace("DTYPE", dtype).replace("SCALES", str(dtype == "float16"))


_CLASSES = (".flatten(0, -2), b.flatten()", ", b")
PROGRAMS = {
    "mlp, AdamW": (_MLP, _train().replace(*_CLASSES)),
    "mlp, SGD": (_MLP, _train(SGD).replace(*_CLASSES)),
    "mlp, fused AdamW": (_MLP, _train(ADAMW.replace("lr=1e-3", "fused=True")).replace(*_CLASSES)),
    "mlp, Adafactor": (_MLP, _train("torch.optim.Adafactor(model.parameters())").replace(*_CLASSES)),
    "mlp, inference": (_MLP, "with torch.no_grad():\n    out = model(x.cuda())\n"),
    "encoder": (_ENCODER.replace("DROPOUT", "0.0"), _train()),
    "encoder, dropout": (_ENCODER.replace("DROPOUT", "0.1"), _train()),
    "encoder, bf16": (_ENCODER.replace("DROPOUT", "0.0"), _mixed("bfloat16")),
    "encoder, fp16 with scaler": (_ENCODER.replace("DROPOUT", "0.0"), _mixed("float16")),
    "gpt": (_GPT.replace("RECOMPUTES", "False"), _train()),
    "gpt, bf16": (_GPT.replace("RECOMPUTES", "False"), _mixed("bfloat16")),
    "gpt, fp16 with scaler": (_GPT.replace("RECOMPUTES", "False"), _mixed("float16")),
    "gpt, checkpointed": (_GPT.replace("RECOMPUTES", "True"), _train()),
    "gpt, checkpointed, bf16": (_GPT.replace("RECOMPUTES", "True"), _mixed("bfloat16")),
    "gpt, a loop of tokens": (_GPT.replace("RECOMPUTES", "False"), _LOOP_OF_TOKENS),
    "cnn": (_CNN, _train().replace(*_CLASSES)),
    "cnn, bf16": (_CNN, _mixed("bfloat16").replace(*_CLASSES)),
    "resnet": (_RESNET, _train(SGD).replace(*_CLASSES)),
    "resnet, fp16 with scaler": (_RESNET, _mixed("float16").replace(*_CLASSES)),
    "autoencoder": (_AE, _train(cell=_UNET_STEP)),
    "gan": (_GAN, _GAN_STEP),
    "lstm": (_LSTM.replace("KIND", "LSTM"), _train()),
    "gru": (_LSTM.replace("KIND", "GRU"), _train()),
    "llama of transformers": (_LLAMA.replace("KV", "8").replace("ATTENTION", "sdpa"), _train(cell=_LIBRARY)),
    "llama, grouped, eager": (_LLAMA.replace("KV", "2").replace("ATTENTION", "eager"), _train(cell=_LIBRARY)),
    "llama, generation": (_LLAMA.replace("KV", "8").replace("ATTENTION", "sdpa"), _GENERATION),
    "bert of transformers": (_BERT, _train(cell=_LIBRARY)),
}
"""What is there before, and the cell that is forecast."""
_VISION = "import torchvision\nmodel = torchvision.models.MODEL().cuda()\nx, y = torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))\n"
_GPT2 = "import transformers\nmodel = transformers.GPT2LMHeadModel(transformers.GPT2Config()).cuda()\nx, y = torch.randint(0, 50257, (2, 8, 1024))\n"
_BERT_BASE = "import transformers\nmodel = transformers.BertForMaskedLM(transformers.BertConfig()).cuda()\nx, y = torch.randint(0, 30522, (2, 32, 256))\n"
_T5 = "import transformers\nmodel = transformers.T5ForConditionalGeneration(transformers.T5Config(d_kv=64)).cuda()\nx, y = torch.randint(0, 32000, (2, 32, 256))\n"
_AUTOCAST = _mixed("bfloat16").replace(
    "F.cross_entropy(model(a).flatten(0, -2), b.flatten())", "model(input_ids=a, labels=b).loss"
)
_CHANNELS = "model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)\n"
OF_REAL_SIZE = {
    "ResNet-50": (_VISION.replace("MODEL", "resnet50"), _train(SGD).replace(*_CLASSES)),
    "ResNet-50, bf16, NHWC": (_VISION.replace("MODEL", "resnet50") + _CHANNELS, _mixed("bfloat16").replace(*_CLASSES)),
    "MobileNet V3": (_VISION.replace("MODEL", "mobilenet_v3_large"), _train().replace(*_CLASSES)),
    "VGG-16": (_VISION.replace("MODEL", "vgg16"), _train(SGD).replace(*_CLASSES)),
    "ViT-B/16": (_VISION.replace("MODEL", "vit_b_16"), _train().replace(*_CLASSES)),
    "ViT-B/16, bf16": (_VISION.replace("MODEL", "vit_b_16"), _mixed("bfloat16").replace(*_CLASSES)),
    "GPT-2": (_GPT2, _train(cell=_LIBRARY)),
    "GPT-2, bf16": (_GPT2, _AUTOCAST),
    "BERT base": (_BERT_BASE, _train(cell=_LIBRARY)),
    "T5 small, bf16": (_T5, _AUTOCAST),
}
"""Models of libraries, for a GPU that computes."""


def measure(names: list[str]) -> None:
    """Print a line of JSON for each program: what was forecast, and what the allocator counted."""
    sys.path.insert(0, str(ROOT / "tests" / "forecast"))
    import torch
    from forecast_lab import nothing, session

    from oomdoctor.forecast import price
    from oomdoctor.model.session import Attempt

    torch.zeros(1, device="cuda")
    is_stub = "STUBCUDA_CC" in os.environ
    if is_stub:
        torch.backends.cuda.enable_cudnn_sdp(False)  # a Hopper's first choice for halves, which the stub has not
    programs = PROGRAMS | OF_REAL_SIZE
    for name in names or (PROGRAMS if is_stub else programs):
        setup, cell = programs[name]
        namespace: dict[str, Any] = {}
        try:
            exec(_COMMON + setup, namespace)
        except ImportError:
            continue
        gc.collect()
        torch.cuda.empty_cache()
        on = session(namespace, cell)
        (found,) = price(on, [Attempt(source=cell)], budget=None, prepare=nothing, timeout_s=120.0, workers=1)
        torch.cuda.reset_peak_memory_stats()
        exec(cell, namespace)
        measured = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        told = found.peak, found.reserved
        print(json.dumps([name, told, measured, found.error_ratio, found.refused]), flush=True)
        namespace.clear()


def run(card: str, names: list[str]) -> list[Any]:
    """Return the rows of a card, from a process of its own."""
    _, sms, expands = (CARDS | HERE)[card]
    env = dict(os.environ)
    if card in CARDS:
        env |= {"STUBCUDA_CC": card.rstrip("x"), "STUBCUDA_SMS": str(sms), "STUBCUDA_MEM": "40GiB"}
        env["STUBCUDA_COMPUTE"] = "0"
    if expands:
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    command = [sys.executable, __file__, "--measure", *names]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def _title(card: str) -> str:
    if card in CARDS:
        return CARDS[card][0]
    import torch

    return torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0] + HERE[card][0]


def table(rows: dict[str, list[Any]]) -> str:
    """Return the figures as text."""
    head = f"{'card':18}{'program':28}{'allocated':>15}{'forecast':>15}{'error':>9}{'reserved':>15}{'forecast':>15}{'error':>9}{'margin':>8}"
    lines, errors, late, outside, refused = [head], [], [], 0, 0
    for card, of_card in rows.items():
        for name, told, measured, margin, why in of_card:
            title = f"{_title(card):18}{name:28}"
            if why is not None:
                refused += 1
                lines.append(f"{title}refused: {why}")
                continue
            peak, reserved = (mine / real - 1 for mine, real in zip(told, measured, strict=True))
            errors.append(abs(peak))
            late.append(abs(reserved))
            is_outside = max(abs(peak), abs(reserved)) > margin
            outside += is_outside
            lines.append(
                f"{title}{measured[0]:15,}{told[0]:15,}{peak:+9.2%}{measured[1]:15,}{told[1]:15,}{reserved:+9.2%}{margin:8.0%}"
                + (" OUTSIDE" if is_outside else "")
            )
    if errors:
        lines.append(
            f"{len(errors)} forecasts, {refused} refused, {outside} outside of their margin. "
            f"Allocated: median {statistics.median(errors):.2%}, worst {max(errors):.2%}. "
            f"Reserved: median {statistics.median(late):.2%}, worst {max(late):.2%}."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--card", action="append", choices=CARDS)
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.measure:
        measure(asked.names)
        return
    cards = HERE if asked.here else asked.card or CARDS
    text = table({card: run(card, asked.names) for card in cards})
    print(text)
    if asked.write:
        (ON_A_GPU if asked.here else RESULTS).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
