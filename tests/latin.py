"""How much of what is shown is left in Latin letters, where it is neither code, nor a name, nor a unit."""

from __future__ import annotations

import html
import re

_TAGS = re.compile(
    r"<style.*?</style>|<code[^>]*>.*?</code>|<pre[^>]*>.*?</pre>|(?<=\bsrc=)\"[^\"]*\"|<[^>]*?(?=title=|alt=|>)|style=\"[^\"]*\"",
    re.DOTALL,
)
_CODE = re.compile(r"`[^`]*`|%+\w+( (?!\s)[\w=-]+)*|https?://\S+|^ *[-+@│].*$|\S*[_.=\[\]/]\S*|--\S+", re.MULTILINE)
_NAMES = re.compile(
    r"\b(CPU|GPU|GPUs|CUDA|PyTorch|torch|NumPy|Python|cuda|cuBLAS|cuDNN|NCCL|Tesla|JSON|In|XPU|MPS|NVML|NVIDIA|ROCm|"
    r"Adam\w*|SGD|DataLoader|traceback|diff|fp32|RSS|USS|PSS|KV|[KMGT]iB|B|GB|s|ms|FLOPs|[KMGT]FLOPs|RTX|MI300X|host|"
    r"inactive split|pid|float\d+|bfloat16|autograd|autocast|oomdoctor|JupyterLab|loss|logits|epoch|cgroup|dropout)\b"
)


def shown(text: str) -> str:
    """Return what is left of a text or a page without code, names and units."""
    text = html.unescape(_TAGS.sub(" ", text)) if "</" in text else text
    return _NAMES.sub("", _CODE.sub("", text))


def latin_share(text: str) -> float:
    """Return the share of Latin letters in all letters, a Chinese character counting for two of them."""
    left = shown(text)
    latin, chinese = len(re.findall(r"[A-Za-z]", left)), len(re.findall(r"[\u3400-\u9fff]", left))
    return latin / max(latin + 2 * chinese, 1)
