"""What notebooks do with a device, as cells that check themselves; and a model that was measured on a real one."""

from __future__ import annotations

IMPORTS = "import copy, torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"

IDIOMS = {
    "factories": """
x = torch.ones(4, device="cuda:0")
assert x.device == torch.device("cuda:0") and x.is_cuda and not x.is_cpu and x.get_device() == 0
assert torch.zeros_like(x).is_cuda and x.new_zeros(2).is_cuda and x.new_tensor([1]).is_cuda and x[1:].is_cuda
assert torch.tensor([1, 2], device="cuda").is_cuda and torch.as_tensor(torch.ones(2), device="cuda").is_cuda
assert torch.arange(4, device=x.device).is_cuda and torch.randn(3, device=torch.device("cuda")).is_cuda
assert not torch.FloatTensor([1, 2]).is_cuda and not torch.Tensor(3, 4).is_cuda and not torch.ones(2).is_cuda
""",
    "moves": """
x = torch.ones(4)
there = torch.device("cuda")
for y in (x.to("cuda"), x.cuda(), x.to(0), x.to(there), x.to("cuda", torch.float64), x.cuda(non_blocking=True)):
    assert y.is_cuda and not x.is_cuda and not y.cpu().is_cuda and not y.to("cpu").is_cuda and y.to(y).is_cuda
assert x.to("cuda", torch.float16).dtype is x.to(dtype=torch.float16, device="cuda").dtype is torch.float16
assert x.type_as(x.cuda().half()).is_cuda and not x.cuda().type_as(x).is_cuda and x.pin_memory().cuda().is_cuda
assert x.cuda().cuda().is_cuda and x.to(torch.float16).device.type == "cpu" and x.to("cuda", copy=True).is_cuda
""",
    "modules": """
m = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).cuda()
assert all(t.is_cuda for t in m.state_dict().values()) and m(torch.ones(2, 4, device="cuda")).is_cuda
device = next(m.parameters()).device
m(torch.ones(2, 4, device=device)).sum().backward()
assert m[0].weight.grad.device == device == m[0].weight.device
assert copy.deepcopy(m)[0].weight.is_cuda
saved = {name: tensor.cpu() for name, tensor in m.state_dict().items()}
m.load_state_dict(saved)
assert not saved["0.weight"].is_cuda and torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0).is_cuda
m.cpu()
assert not m[0].weight.is_cuda
assert nn.Linear(4, 4, device="cuda").weight.is_cuda
with torch.device("meta"):
    m = nn.Linear(4, 4)
assert m.weight.is_meta and m.to_empty(device="cuda").weight.is_cuda and not m.weight.is_meta
""",
    "questions": """
assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
torch.cuda.set_device(0); torch.cuda.empty_cache(); torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats()
assert torch.cuda.get_device_capability() == (8, 0) and torch.cuda.is_bf16_supported()
assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1] and torch.cuda.get_device_name()
x = torch.ones(256, device="cuda")
assert torch.cuda.memory_allocated() == 1024 == torch.cuda.max_memory_allocated()
del x
assert torch.cuda.memory_allocated() == 0 and torch.cuda.mem_get_info()[0] == torch.cuda.mem_get_info()[1]
assert torch.accelerator.current_accelerator().type == "cuda" and torch.cuda.memory_reserved() >= 0
""",
    "streams": """
begin, end, stream = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True), torch.cuda.Stream()
begin.record()
with torch.cuda.stream(stream), torch.cuda.device(0):
    x = torch.ones(3, device="cuda")
torch.cuda.current_stream().wait_stream(stream)
x.record_stream(stream); end.record(); torch.cuda.synchronize(); begin.elapsed_time(end)
""",
    "seeds": """
torch.manual_seed(0); torch.cuda.manual_seed(0); torch.cuda.manual_seed_all(0)
g = torch.Generator(device="cuda").manual_seed(3)
assert g.device.type == "cuda" and torch.randn(5, device="cuda", generator=g).is_cuda
torch.cuda.set_rng_state(torch.cuda.get_rng_state())
""",
    "default_device": """
with torch.device("cuda"):
    assert nn.Linear(4, 4).weight.is_cuda and torch.tensor([1.0]).is_cuda and torch.ones(2).is_cuda
assert not torch.ones(2).is_cuda
torch.set_default_device("cuda")
assert torch.ones(2).is_cuda and torch.tensor([1]).is_cuda and nn.BatchNorm1d(4).running_mean.is_cuda
""",
    "operations": """
x = torch.randn(4, 4, device="cuda")
found = [
    torch.linalg.norm(x), torch.norm(x), *torch.topk(x, 2), *torch.sort(x), x.cumsum(0), torch.einsum("ij,jk", x, x),
    torch.cat([x, x]), torch.where(x > 0, x, 0.0), x.argmax(-1), torch.multinomial(x.abs(), 1), torch.triu(x),
    F.pad(x, (1, 1)), F.interpolate(x[None, None], scale_factor=2), F.one_hot(x.argmax(-1)), F.one_hot(x.argmax(-1), 5),
    torch.fft.rfft(x), x.std(), x[x > 0], x.nonzero(), torch.unique(x), x.masked_fill(x > 0, 0), x * torch.tensor(2.0),
    x[torch.tensor([0, 1])], F.cross_entropy(x, x.argmax(-1)), F.softmax(x, -1), x.mean(0, keepdim=True) + 1,
]
assert all(y.is_cuda for y in found)
assert x.cpu().numpy().shape == (4, 4) and x.sum().item() and len(x.tolist()) == 4
assert not F.dropout(x.cpu(), 0.5).is_cuda and not torch.ones(3).softmax(0).is_cuda
""",
    "gradients_go_home": """
x = torch.ones(3, requires_grad=True)
(x.to("cuda") * 2).sum().backward()
assert not x.grad.is_cuda
m = nn.Linear(3, 3)
m(x.detach()).cuda().sum().backward()
assert not m.weight.grad.is_cuda
""",
    "training_in_half": """
m = nn.Linear(64, 64).cuda()
optimizer, scaler = torch.optim.Adam(m.parameters()), torch.amp.GradScaler("cuda")
for _ in range(3):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        y = m(torch.randn(8, 64, device="cuda"))
        loss = F.mse_loss(y, torch.zeros_like(y))
        assert y.dtype is torch.float16 and loss.dtype is y.softmax(-1).dtype is torch.float32
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer); torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    scaler.step(optimizer); scaler.update()
assert len(optimizer.state) == 2 and not torch.is_autocast_enabled("cuda") and m(y.float()).dtype is torch.float32
""",
    "old_names": """
from torch.cuda.amp import GradScaler, autocast
m, scaler = nn.Linear(4, 4).cuda(), GradScaler()
with autocast():
    y = m(torch.ones(2, 4, device="cuda"))
assert y.dtype is torch.float16
scaler.scale(y.sum()).backward()
""",
    "checkpoints": """
from torch.utils.checkpoint import checkpoint
m = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)).cuda()
x = torch.randn(8, 64, device="cuda", requires_grad=True)
checkpoint(m, x, use_reentrant=False).sum().backward()
checkpoint(m, x, use_reentrant=True).sum().backward()
assert x.grad.is_cuda
""",
    "attention": """
m = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).cuda()
x = torch.randn(2, 16, 64, device="cuda")
m(x).sum().backward()
m.eval()
with torch.no_grad():
    m(x)
with torch.inference_mode():
    assert m(x).is_cuda
""",
    "optimizers": """
for make in (lambda ps: torch.optim.AdamW(ps, fused=True), lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)):
    m = nn.Linear(4, 4).cuda()
    optimizer = make(m.parameters())
    m(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
    assert all(t.is_cuda for t in optimizer.state[m.weight].values())
""",
    "files": """
found = torch.load(path, map_location="cuda")
assert found["weight"].is_cuda and torch.load(path, map_location=torch.device("cuda:0"))["bias"].is_cuda
nn.Linear(4, 4).cuda().load_state_dict(found)
""",
    "loaders": """
from torch.utils.data import DataLoader, TensorDataset
m = nn.Linear(8, 2).cuda()
optimizer = torch.optim.SGD(m.parameters(), 0.1)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
for x, y in DataLoader(data, batch_size=8, pin_memory=True, num_workers=2):
    x, y = x.cuda(non_blocking=True), y.to("cuda", non_blocking=True)
    optimizer.zero_grad()
    loss = F.cross_entropy(m(x), y)
    loss.backward()
    optimizer.step()
    loss.item()
""",
}
"""Each has to be followed to its end, as on ``cuda``."""

ERRORS = {
    "torch.ones(3, 3) @ torch.ones(3, 3, device='cuda')": "Expected all tensors to be on the same device",
    "nn.Linear(3, 3).cuda()(torch.ones(2, 3))": "Expected all tensors to be on the same device",
    "torch.ones(3, device='cuda') + torch.ones(3)": "Expected all tensors to be on the same device",
    "torch.ones(3, device='cuda').numpy()": "can't convert cuda:0 device type tensor to numpy",
    "torch.ones(3, device='cuda:1')": "invalid device ordinal",
    "torch.ones(3, device='cuda'), torch.ones(3, device='mps')": "there is no device mps",
    "with torch.autocast('cuda'): F.binary_cross_entropy(*torch.rand(2, 3, device='cuda'))": "unsafe to autocast",
    "with torch.autocast('cuda'), torch.autocast('cpu'): torch.ones(1, device='cuda')": "inside of that of the device",
}
"""Cells with what is said of them: the error that CUDA would raise, or why they are not followed."""

LANGUAGE_MODEL = """
import math, torch
from torch import nn

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
    def forward(self, x):
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * rms
        return self.weight * x

def softmax(x):
    rescaled = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponential = torch.exp(rescaled)
    return exponential / torch.sum(exponential, dim=-1, keepdim=True)

def attend(q, k, v, mask):
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.size(-1))
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)

def rotate(x, cos, sin):
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    a = cos * x1 - sin * x2
    b = sin * x1 + cos * x2
    return torch.stack([a, b], -1).flatten(-2)

class Attention(nn.Module):
    def __init__(self, width, heads, angles):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.heads, self.cos, self.sin = heads, *angles
    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = self.split(q), self.split(k), self.split(v)
        q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        order = torch.arange(x.size(1), device=x.device)
        mask = order[:, None] >= order[None, :]
        out = attend(q, k, v, mask)
        out = out.transpose(1, 2).contiguous().flatten(-2)
        return self.out(out)

class FeedForward(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
    def silu(self, x):
        return x * torch.sigmoid(x)
    def forward(self, x):
        return self.w2(self.silu(self.w1(x)) * self.w3(x))

class Block(nn.Module):
    def __init__(self, width, heads, inner, angles):
        super().__init__()
        self.n1, self.attention = Norm(width), Attention(width, heads, angles)
        self.n2, self.ffn = Norm(width), FeedForward(width, inner)
    def forward(self, x):
        attended = self.attention(self.n1(x))
        residual = x + attended
        fed = self.ffn(self.n2(residual))
        return residual + fed

class LanguageModel(nn.Module):
    def __init__(self, context, width=1024, layers=24, heads=16, inner=4096, vocabulary=10000):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocabulary, width))
        self.angles = torch.ones(context, width // heads // 2, device="cuda")
        angles = self.angles.cos(), self.angles.sin()
        self.layers = nn.ModuleList(Block(width, heads, inner, angles) for _ in range(layers))
        self.norm, self.head = Norm(width), nn.Linear(width, vocabulary, bias=False)
    def forward(self, tokens):
        embedded = self.embedding[tokens]
        x = embedded
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

def log_softmax(x):
    x = x - torch.max(x, dim=-1, keepdim=True)[0]
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))

def cross_entropy(logits, targets):
    negative = -log_softmax(logits)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))

class AdamW(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad.data
                p.data -= 1e-5 * p.data
                m = state.get("m", torch.zeros_like(p.data))
                v = state.get("v", torch.zeros_like(p.data))
                m = 0.9 * m + 0.1 * grad
                v = 0.999 * v + 0.001 * grad**2
                p.data -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
                state["m"], state["v"] = m, v

with torch.device("meta"):
    model = LanguageModel(CONTEXT)
model.to_empty(device="cuda")
tokens = torch.randint(0, 10000, (4, CONTEXT), device="cuda")
targets = torch.randint(0, 10000, (4, CONTEXT), device="cuda")
"""
"""A transformer for language as it is written in courses, whose memory was recorded on a real card."""

INFERENCE = """
with torch.inference_mode(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=HALF):
    model(tokens)
"""

TRAINING = """
optimizer = AdamW(model.parameters())
for _ in range(5):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=HALF):
        loss = cross_entropy(model(tokens), targets)
    loss.backward()
    optimizer.step()
"""
