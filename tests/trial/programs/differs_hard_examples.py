"""Only the hardest quarter of the batch's rows is trained on (online hard example mining). Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(155)
detector = nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 2))
opt = torch.optim.SGD(detector.parameters(), lr=0.1)
boxes, labels = torch.randn(48, 9), torch.randint(0, 2, (48,))


def ohem(logits, target, keep=0.25):
    losses = F.cross_entropy(logits, target, reduction="none")
    return losses.topk(max(1, int(keep * len(losses)))).values.mean()

# %% before
for i in range(0, 48, 16):
    opt.zero_grad()
    loss = ohem(detector(boxes[i : i + 16]), labels[i : i + 16])
    loss.backward()
    opt.step()

# %% after
for i in range(0, 48, 16):
    opt.zero_grad()
    loss = 0.0
    for j in range(i, i + 16, 4):
        part = ohem(detector(boxes[j : j + 4]), labels[j : j + 4]) / 4
        part.backward()
        loss += part.detach()
    opt.step()
