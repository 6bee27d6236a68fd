"""Losses that are only drawn and averaged later are detached before they are kept."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(23)
net = nn.Sequential(nn.Linear(9, 30), nn.ReLU(), nn.Linear(30, 1))
opt = torch.optim.Adam(net.parameters())
x, y = torch.randn(4, 16, 9), torch.randn(4, 16, 1)
history = {"loss": [], "mae": []}

# %% before
epoch_loss = 0
for xb, yb in zip(x, y):
    opt.zero_grad()
    out = net(xb)
    loss = nn.functional.huber_loss(out, yb)
    loss.backward()
    opt.step()
    history["loss"].append(loss)
    history["mae"].append((out - yb).abs().mean())
    epoch_loss += loss
print("mean loss", float(epoch_loss / len(x)), "best", min(v.item() for v in history["mae"]))

# %% after
epoch_loss = 0
for xb, yb in zip(x, y):
    opt.zero_grad()
    out = net(xb)
    loss = nn.functional.huber_loss(out, yb)
    loss.backward()
    opt.step()
    history["loss"].append(loss.detach())
    history["mae"].append((out - yb).abs().mean().detach())
    epoch_loss += loss.detach()
print("mean loss", float(epoch_loss / len(x)), "best", min(v.item() for v in history["mae"]))
