"""The seed is set anew before each part's augmentation, so that all parts get the same shifts. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(127)
images, labels = torch.randn(32, 1, 8, 8), torch.randint(0, 3, (32,))
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
opt = torch.optim.SGD(net.parameters(), lr=0.05)


def augment(x):
    return x + 0.2 * torch.randn(len(x), 1, 1, 1)

# %% before
for step in range(2):
    torch.manual_seed(1000 + step)
    xb, yb = augment(images[step * 16 : step * 16 + 16]), labels[step * 16 : step * 16 + 16]
    opt.zero_grad()
    loss = F.cross_entropy(net(xb), yb)
    loss.backward()
    opt.step()

# %% after
for step in range(2):
    opt.zero_grad()
    shown, loss = [], 0.0
    for part in range(2):
        torch.manual_seed(1000 + step)
        rows = slice(step * 16 + part * 8, step * 16 + part * 8 + 8)
        xb, yb = augment(images[rows]), labels[rows]
        half = F.cross_entropy(net(xb), yb) / 2
        half.backward()
        shown.append((xb, yb))
        loss += half.detach()
    xb, yb = (torch.cat(t) for t in zip(*shown))
    opt.step()
