"""A OneCycle schedule steps once per batch, also where the batch is taken in parts."""

# %% setup
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(12)
train_dl = DataLoader(TensorDataset(torch.randn(80, 9), torch.randint(0, 4, (80,))), 16, shuffle=True)
model = nn.Sequential(nn.Linear(9, 20), nn.SiLU(), nn.Linear(20, 4))
opt = torch.optim.AdamW(model.parameters())
sched = OneCycleLR(opt, max_lr=0.01, steps_per_epoch=len(train_dl), epochs=1)
lrs = []

# %% before
def fit_one_cycle(epochs, loss_func=nn.functional.cross_entropy):
    for epoch in range(epochs):
        for xb, yb in train_dl:
            loss = loss_func(model(xb), yb)
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
            lrs.append(sched.get_last_lr()[0])
            sched.step()
        print("Epoch [{}], last_lr: {:.6f}, loss {:.4f}".format(epoch, lrs[-1], loss.item()))


fit_one_cycle(1)

# %% after
def fit_one_cycle(epochs, loss_func=nn.functional.cross_entropy, parts=4):
    for epoch in range(epochs):
        for xb, yb in train_dl:
            total = 0.0
            for xp, yp in zip(xb.chunk(parts), yb.chunk(parts), strict=True):
                loss = loss_func(model(xp), yp, reduction="sum") / len(xb)
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
            lrs.append(sched.get_last_lr()[0])
            sched.step()
        print("Epoch [{}], last_lr: {:.6f}, loss {:.4f}".format(epoch, lrs[-1], total))


fit_one_cycle(1)
