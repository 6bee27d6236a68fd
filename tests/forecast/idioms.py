"""Cells as they stand in notebooks, a title before each; STEP is a training step on ``x`` and ``y``."""

STEP = """
optimizer.zero_grad()
loss = F.cross_entropy(model(x), y)
loss.backward()
optimizer.step()
"""

CELLS = """
# %% item
losses = []
for x, y in loader:
    STEP
    losses.append(loss.item())
mean = sum(losses) / len(losses)

# %% formatted losses
for i, (x, y) in enumerate(loader):
    STEP
    print(f"{i} loss {loss:.4f} {loss.item():8.3f} {float(loss)}", int(loss))

# %% early stopping
best, patience = float("inf"), 0
for epoch in range(8):
    for x, y in loader:
        STEP
    if loss < best:
        best = loss
    else:
        patience += 1
        if patience > 3:
            break

# %% best so far is saved
best = 1e9
for x, y in loader:
    STEP
    if loss.item() < best:
        best = loss.item()
        torch.save(model.state_dict(), "/best.pt")

# %% accuracy
right = 0
for x, y in loader:
    STEP
    right += (model(x).argmax(1) == y).sum().item()
print(right / len(loader.dataset))

# %% nan check
for x, y in loader:
    STEP
    assert not torch.isnan(loss).any(), "diverged"
    if not torch.isfinite(loss):
        raise ValueError("diverged")

# %% masks
for x, y in loader:
    STEP
    kept = x[x > 0]
    rows = x[y == 1]
    x[x < 0] = 0.0

# %% nonzero
for x, y in loader:
    STEP
    where = (y == 3).nonzero()
    some = x[where.squeeze(1)]
    a, b = torch.where(x > 0)

# %% a mask of pairs
for x, y in loader:
    found = F.normalize(model(x), dim=1)
    labels = torch.cat([torch.arange(len(x) // 2) for _ in range(2)])
    pairs = (labels[None] == labels[:, None]).float()
    others = ~torch.eye(len(labels), dtype=torch.bool)
    scores = (found @ found.T)[others].view(len(labels), -1)
    pairs = pairs[others].view(len(labels), -1)
    positives = scores[pairs.bool()].view(len(labels), -1)
    negatives = scores[~pairs.bool()].view(len(labels), -1)
    loss = F.cross_entropy(torch.cat([positives, negatives], 1), torch.zeros(len(labels), dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %% unique
for x, y in loader:
    STEP
    picked = torch.masked_select(x, x > 0)
    values, counts = y.unique(return_counts=True)
    where = torch.bincount(y, minlength=10)

# %% tensors are printed
for x, y in loader:
    STEP
print(loss, x, model[0].weight)
repr(x), str(model)

# %% a generator over the loader
def batches():
    for x, y in loader:
        yield x, y
for x, y in batches():
    STEP

# %% a progress bar
import sys
class Bar:
    def __init__(self, items):
        self.items = items
    def __iter__(self):
        for item in self.items:
            sys.stderr.write("#")
            sys.stderr.flush()
            yield item
for x, y in Bar(loader):
    STEP

# %% a closure
def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss
for x, y in loader:
    optimizer.step(closure)

# %% EMA by deepcopy
import copy
ema = copy.deepcopy(model)
for x, y in loader:
    STEP
    with torch.no_grad():
        for a, b in zip(ema.parameters(), model.parameters()):
            a.mul_(0.9).add_(b, alpha=0.1)

# %% state dict is copied and loaded
import copy
state = copy.deepcopy(model.state_dict())
model.load_state_dict(state)
model(data)

# %% gradients are clipped
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if norm > 100:
        print(norm)
    optimizer.step()

# %% gradients are changed in place
for x, y in loader:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        p.grad = p.grad / 2
        p.grad.data.clamp_(-1, 1)
    optimizer.step()

# %% autocast with a scaler
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()

# %% schedulers
cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1000)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
for epoch in range(3):
    for x, y in loader:
        STEP
        cycle.step()
    cycle.get_last_lr()
    plateau.step(loss)

# %% numpy and lists
for x, y in loader:
    STEP
    value = loss.detach().cpu().numpy()
    predicted = model(x).detach().numpy().argmax(1)
    share = (predicted == y.numpy()).mean()
    labels = y.tolist(), model(x).argmax(1).tolist()

# %% next of an iterator with a restart
it = iter(loader)
for step in range(12):
    try:
        x, y = next(it)
    except StopIteration:
        it = iter(loader)
        x, y = next(it)
    STEP

# %% next of an iterator without one
it = iter(loader)
for step in range(4):
    x, y = next(it)
    STEP

# %% enumerate and zip
for i, ((x, y), _) in enumerate(zip(loader, loader)):
    STEP
    if i % 2 == 0:
        print(i, loss.item())

# %% SGD by hand
optimizer = None
for i in range(20):
    loss = model(data).sum()
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
            p.grad = None

# %% data is assigned
for p in model.parameters():
    p.data = p.data * 0.5
    p.data.mul_(2)
model(data).sum().backward()

# %% training in double precision
model.double()
for x, y in loader:
    x = x.double()
    STEP

# %% an assertion in a long loop
out = model(data[:32])
for step in range(80):
    assert (out.exp() > 0).all()
out.sum().backward()
# %% rejection sampling
x = torch.rand(3)
while not (x > 0.5).all():
    x = torch.rand(3)
while (x < 0.7).any():
    x = x + 0.1
model(data)

# %% initialisers
layer = nn.Linear(600, 600)
nn.init.trunc_normal_(layer.weight)
nn.init.orthogonal_(layer.weight)
nn.init.kaiming_normal_(layer.weight)

# %% sampling
p = torch.softmax(model(data), -1)
i = torch.multinomial(p, 1)
k = torch.topk(p, 3).indices[0, 0].item()

# %% a split with a loader that has workers
from torch.utils.data import DataLoader, random_split
a, b = random_split(loader.dataset, [100, len(loader.dataset) - 100])
with_workers = DataLoader(a, batch_size=10, num_workers=2, pin_memory=False, persistent_workers=True)
for x, y in with_workers:
    STEP

# %% compiled
fast = torch.compile(model)
@torch.compile
def double(x):
    return x * 2
for x, y in loader:
    STEP
    double(fast(x))

# %% a function of an earlier cell
train(model, loader)

# %% the graph of an earlier cell
kept.backward()
optimizer.step()

# %% the optimizer's state dict
for x, y in loader:
    STEP
state = optimizer.state_dict()
optimizer.load_state_dict(state)

# %% sleep
import time
start = time.time()
time.sleep(100)
for x, y in loader:
    STEP

# %% an exit
import sys
model(data)
sys.exit()

# %% functional gradients
g, = torch.autograd.grad(model(data).sum(), [model[0].weight])
norm = g.norm().item()

# %% hooks
seen = []
hook = model[0].register_forward_hook(lambda m, i, o: seen.append(o.detach().mean().item()))
model(data)
hook.remove()

# %% results are put into a buffer
out = torch.zeros(len(data), 10)
for i in range(0, len(data), 100):
    out[i:i + 100] = model(data[i:i + 100])

# %% literals
w = torch.tensor([1.0, 2.0])
assert w[1].item() == 2.0
assert w.tolist() == [1.0, 2.0]
steps = 0
for i in range(torch.tensor([1, 2]).sum().item()):
    steps += 1
assert steps == 3
model(data)

# %% lengths
lengths = torch.tensor([3, 2, 1])
a, b, c = torch.split(torch.randn(6, 2), lengths.tolist())
assert (len(a), len(b), len(c)) == (3, 2, 1)
pad = torch.zeros(3, int(lengths.max()))
padded = nn.utils.rnn.pad_sequence([a, b, c])
model(data)

# %% a counter that was there before
for i in range(3):
    counter += 1
assert counter.item() == 8
assert int(counter) + counter.tolist() == 16
model(data)

# %% a buffer that counts
norm = nn.BatchNorm1d(256)
for i in range(3):
    norm(data)
assert norm.num_batches_tracked.item() == 3

# %% no grad and inference mode
model.eval()
with torch.no_grad():
    for x, y in loader:
        out = model(x)
with torch.inference_mode():
    for x, y in loader:
        out = model(x)
        scores = out.max(1).values.cpu().numpy()

# %% cuda if there is one
device = "cuda" if torch.cuda.is_available() else "cpu"
model.to(device)
for x, y in loader:
    x, y = x.to(device), y.to(device, non_blocking=True)
    STEP
torch.cuda.empty_cache()

# %% per-sample gradients
from torch.func import functional_call, grad, vmap
params = {name: p.detach() for name, p in model.eval().named_parameters()}
def loss_of(params, x):
    return functional_call(model, params, (x[None],)).sum()
grads = vmap(grad(loss_of), in_dims=(None, 0))(params, data[:8])

# %% threads
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(2) as pool:
    squares = list(pool.map(lambda i: i * i, range(4)))
assert squares == [0, 1, 4, 9]
model(data)

# %% tqdm
from tqdm.auto import tqdm
bar = tqdm(loader, desc="train")
for x, y in bar:
    STEP
    bar.set_postfix(loss=f"{loss.item():.3f}")

# %% the losses are plotted
import matplotlib.pyplot as plt
losses = []
for x, y in loader:
    STEP
    losses.append(loss.item())
plt.plot(losses, label="train")
plt.legend()
plt.savefig("/losses.png")
plt.show()

# %% metrics are sent to a service
class Run:
    def __init__(self, project, config):
        self.rows, self.file = [], open("/run.jsonl", "a")
    def log(self, row):
        import json
        self.rows.append(row)
        self.file.write(json.dumps(row) + chr(10))
run = Run("project", config={"lr": optimizer.param_groups[0]["lr"]})
for x, y in loader:
    STEP
    run.log({"loss": loss.item(), "grad": sum(p.grad.norm().item() for p in model.parameters())})

# %% a sampling loop
head, tokens = nn.Linear(64, 5000), torch.zeros(4, 1, dtype=torch.long)
table = nn.Embedding(5000, 64)
with torch.no_grad():
    for i in range(20):
        logits = head(table(tokens))[:, -1] / 0.8
        values, _ = torch.topk(logits, 50)
        logits[logits < values[:, [-1]]] = -float("inf")
        following = torch.multinomial(F.softmax(logits, dim=-1), 1)
        tokens = torch.cat([tokens, following], dim=1)

# %% a sampling loop that ends with a token
head, tokens = nn.Linear(64, 5000), torch.zeros(1, 1, dtype=torch.long)
table = nn.Embedding(5000, 64)
with torch.no_grad():
    for i in range(20):
        following = head(table(tokens))[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], dim=1)
        if following.item() == 4999:
            break

# %% weight tying
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(2000, 64), nn.Linear(64, 2000, bias=False)
        self.head.weight = self.table.weight
    def forward(self, tokens):
        return self.head(self.table(tokens))
tied = Tied()
tying = torch.optim.AdamW(tied.parameters())
tokens = torch.randint(0, 2000, (8, 33))
for i in range(5):
    tying.zero_grad()
    F.cross_entropy(tied(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    tying.step()

# %% an averaged model
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
for x, y in loader:
    STEP
    ema.update_parameters(model)

# %% a custom autograd function
class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, most):
        ctx.save_for_backward(x)
        ctx.most = most
        return x.clamp(-most, most)
    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return grad * (x.abs() <= ctx.most), None
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(Clip.apply(model(x), 3.0), y)
    loss.backward()
    optimizer.step()

# %% backward hooks
norms = {}
def keep(name):
    return lambda module, given, out: norms.__setitem__(name, out[0].norm().item())
handles = [m.register_full_backward_hook(keep(n)) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
for x, y in loader:
    STEP
for handle in handles:
    handle.remove()

# %% activations are kept by hooks
kept_activations = {}
for name, module in model.named_children():
    module.register_forward_hook(lambda m, i, o, name=name: kept_activations.__setitem__(name, o.detach()))
with torch.no_grad():
    model(data)

# %% activation checkpoints
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(checkpoint_sequential(model, 3, x, use_reentrant=False), y)
    loss.backward()
    optimizer.step()

# %% gradient accumulation
every = 2
for i, (x, y) in enumerate(loader):
    for part, target in zip(x.split(64), y.split(64)):
        (F.cross_entropy(model(part), target) / 4).backward()
    if (i + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()

# %% layers are frozen
for p in model[:3].parameters():
    p.requires_grad_(False)
partial = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
for x, y in loader:
    partial.zero_grad()
    F.cross_entropy(model(x), y).backward()
    partial.step()

# %% two optimizers
generator, judge = nn.Linear(32, 256), nn.Linear(256, 1)
of_generator, of_judge = torch.optim.Adam(generator.parameters()), torch.optim.Adam(judge.parameters())
for x, _ in loader:
    made = generator(torch.randn(len(x), 32))
    of_judge.zero_grad()
    (judge(x).mean() - judge(made.detach()).mean()).backward()
    of_judge.step()
    of_generator.zero_grad()
    judge(made).mean().backward()
    of_generator.step()

# %% the best weights are kept
import copy
best, best_state = float("inf"), None
for epoch in range(3):
    for x, y in loader:
        STEP
    if loss < best:
        best, best_state = loss.item(), copy.deepcopy(model.state_dict())
model.load_state_dict(best_state)

# %% outputs are gathered
outs = []
with torch.no_grad():
    for x, y in loader:
        outs.append(model[0](x))
everything = torch.cat(outs)

# %% losses are kept with their graphs
kept_losses = []
for x, y in loader:
    STEP
    kept_losses.append(F.cross_entropy(model(x), y))

# %% a trainer class
class Trainer:
    def __init__(self, model, optimizer, loader):
        self.model, self.optimizer, self.loader, self.step = model, optimizer, loader, 0
    def fit(self, epochs):
        for epoch in range(epochs):
            for batch in self.loader:
                self.training_step(*batch)
            self.evaluate()
    def training_step(self, x, y):
        STEP
        self.step += 1
    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        hits = sum((self.model(x).argmax(-1) == y).sum().item() for x, y in self.loader)
        self.model.train()
        return hits / len(self.loader.dataset)
Trainer(model, optimizer, loader).fit(2)

# %% cross validation
for fold in range(3):
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    adam = torch.optim.Adam(net.parameters())
    for x, y in loader:
        adam.zero_grad()
        F.cross_entropy(net(x), y).backward()
        adam.step()

# %% mixup and permutations
import numpy as np
for x, y in loader:
    share, order = np.random.beta(0.4, 0.4), torch.randperm(len(x))
    x = share * x + (1 - share) * x[order]
    STEP

# %% a causal mask
q = torch.randn(2, 4, 128, 32)
scores = q @ q.transpose(-1, -2)
mask = torch.triu(torch.ones(128, 128, dtype=torch.bool), diagonal=1)
out = scores.masked_fill(mask, float("-inf")).softmax(-1) @ q

# %% a convergence loop
v = torch.rand(256)
matrix = data.T @ data
for i in range(1000):
    w = matrix @ v
    w = w / w.norm()
    if (w - v).norm() < 1e-6:
        break
    v = w

# %% an error of memory is caught
try:
    out = model(data)
except torch.OutOfMemoryError:
    import gc
    gc.collect()
    out = model(data[:10])

# %% inference with normalisation
net = nn.Sequential(nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.Upsample(scale_factor=2)).eval()
with torch.inference_mode():
    net(data[:32, None])

# %% the value of an inference tensor is asked for outside
for x, y in loader:
    STEP
    with torch.inference_mode():
        right = model(data[:32]).topk(2, 1)[1].t().eq(y[:1]).flatten().sum(dtype=torch.float32)
    print(right.item())

# %% weights are parametrised
from torch.nn.utils.parametrizations import weight_norm
normed = weight_norm(nn.Linear(256, 1000))
normed(data).sum().backward()

# %% a generator that is told
def averages():
    total, count = 0.0, 0
    while True:
        value = yield total / max(count, 1)
        total, count = total + value, count + 1
average = averages()
next(average)
for x, y in loader:
    STEP
    mean = average.send(loss.item())
"""


def cells() -> dict[str, str]:
    """Return the cells by title, with the steps written out."""
    found = {}
    for part in CELLS.split("# %% ")[1:]:
        title, _, body = part.partition("\n")
        lines = []
        for line in body.splitlines():
            indent = line[: len(line) - len(line.lstrip())]
            lines += [indent + step for step in STEP.strip().splitlines()] if line.strip() == "STEP" else [line]
        found[title] = "\n".join(lines)
    return found
