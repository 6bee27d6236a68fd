"""A function lets go of its batch's graph before it validates; nothing that is kept depends on it."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(48)
net = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
x, y, vx, vy = torch.randn(32, 10), torch.randint(0, 2, (32,)), torch.randn(32, 10), torch.randint(0, 2, (32,))
report = []

# %% before
def epoch(n):
    out = net(x)
    loss = nn.functional.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    train_loss = loss.item()
    val_out = net(vx)
    val_loss = nn.functional.cross_entropy(val_out, vy).item()
    report.append({"epoch": n, "train": train_loss, "val": val_loss})


for n in range(2):
    epoch(n)

# %% after
def epoch(n):
    out = net(x)
    loss = nn.functional.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    train_loss = loss.item()
    del out, loss
    with torch.inference_mode():
        val_out = net(vx)
        val_loss = nn.functional.cross_entropy(val_out, vy).item()
    report.append({"epoch": n, "train": train_loss, "val": val_loss})


for n in range(2):
    epoch(n)
