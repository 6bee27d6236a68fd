"""BCE with weights of positives is a plain mean over rows and labels, whatever the weights are."""

# %% setup
import torch
from torch import nn

torch.manual_seed(36)
x, tags = torch.randn(42, 20), (torch.rand(42, 6) < 0.2).float()
net = nn.Sequential(nn.Linear(20, 16), nn.PReLU(), nn.Linear(16, 6))
optim = torch.optim.NAdam(net.parameters(), lr=3e-3)
loss_fn = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 4.0, 4.0, 2.0, 8.0, 3.0]))

# %% before
for epoch in range(2):
    for rows in torch.randperm(42).split(21):
        optim.zero_grad()
        loss = loss_fn(net(x[rows]), tags[rows])
        loss.backward()
        optim.step()

# %% after
for epoch in range(2):
    for rows in torch.randperm(42).split(21):
        optim.zero_grad()
        loss = 0.0
        for some in rows.split(8):
            part = loss_fn(net(x[some]), tags[some]) * len(some) / len(rows)
            part.backward()
            loss += part.detach()
        optim.step()
