"""Without batch_first the encoder layer attends over the rows of the batch, not over time. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(149)
layer = nn.TransformerEncoderLayer(d_model=8, nhead=2, dim_feedforward=16, dropout=0.0)
out = nn.Linear(8, 2)
opt = torch.optim.SGD([*layer.parameters(), *out.parameters()], lr=0.1)
series, kind = torch.randn(32, 6, 8), torch.randint(0, 2, (32,))

# %% before
for i in range(0, 32, 16):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(out(layer(series[i : i + 16])[:, -1]), kind[i : i + 16])
    loss.backward()
    opt.step()

# %% after
for i in range(0, 32, 16):
    opt.zero_grad()
    loss = 0.0
    for j in range(i, i + 16, 4):
        part = nn.functional.cross_entropy(out(layer(series[j : j + 4])[:, -1]), kind[j : j + 4]) / 4
        part.backward()
        loss += part.detach()
    opt.step()
