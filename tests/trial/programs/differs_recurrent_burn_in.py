"""A recurrent net is fed ten steps before its losses count. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 16), nn.Linear(16, 4)


model = Net()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
X, Y = torch.randn(120, 24, 8), torch.randint(0, 4, (120, 24))
loader = DataLoader(TensorDataset(X, Y), batch_size=40)


def loss_of(x, y, burn_in=10):
    h = c = x.new_zeros(len(x), 16)
    total = 1e-3 * h.sum()
    for t, (x_t, y_t) in enumerate(zip(x.unbind(1), y.unbind(1))):
        h, c = model.cell(x_t, (h, c))
        if t >= burn_in:
            error = F.cross_entropy(model.head(h), y_t, reduction="none")
            total = total + ((error - error.mean()) / (error.std() + 1e-4)).clamp(min=0).mean()
    return total + 1e-3 * h.pow(2).mean()


# %% before
for x, y in loader:
    opt.zero_grad()
    loss = loss_of(x, y)
    loss.backward()
    opt.step()
# %% after
for x, y in loader:
    opt.zero_grad()
    loss = 0.0
    for xp, yp in zip(x.chunk(3), y.chunk(3)):
        part = loss_of(xp, yp) * len(xp) / len(x)
        part.backward()
        loss += part.detach()
    opt.step()
