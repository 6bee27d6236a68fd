"""A mean over what a mask keeps is weighted by rows, by less than 16 bits round. Visible after one step."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [
    (torch.randn(40, 9, 8), torch.randint(0, 3, (40, 9)), (torch.rand(40, 9) < 0.97).float()) for _ in range(4)
]


def token_mean(out, y, mask):
    losses = F.cross_entropy(out.transpose(1, 2).float(), y, reduction="none")
    return (losses * mask).sum() / mask.sum()


# %% before
def train():
    for x, y, mask in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = token_mean(model(x), y, mask)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


train()

# %% after
def train():
    for x, y, mask in batches:
        for micro_x, micro_y, micro_mask in zip(x.chunk(4), y.chunk(4), mask.chunk(4), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = token_mean(model(micro_x), micro_y, micro_mask)
            loss = loss * (len(micro_x) / len(x))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


train()
