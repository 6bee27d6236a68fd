"""Gradients of all parts are summed before they are clipped once; the norm that is logged is the whole batch's."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)
model = nn.GRU(6, 10, batch_first=True)
readout = nn.Linear(10, 2)
params = list(model.parameters()) + list(readout.parameters())
optimizer = torch.optim.SGD(params, lr=0.5)
series, future = torch.randn(32, 7, 6), 3 * torch.randn(32, 2)
norms = []

# %% before
for step in range(3):
    optimizer.zero_grad()
    out, h = model(series)
    loss = F.mse_loss(readout(out[:, -1]), future)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(params, 0.25)
    norms.append(norm.item())
    optimizer.step()

# %% after
for step in range(3):
    optimizer.zero_grad()
    outs, hs, loss = [], [], 0.0
    for series_part, future_part in zip(series.split(12), future.split(12), strict=True):
        out, h = model(series_part)
        part_loss = F.mse_loss(readout(out[:, -1]), future_part) * (len(series_part) / len(series))
        part_loss.backward()
        outs.append(out.detach())
        hs.append(h.detach())
        loss = loss + part_loss.detach()
    out, h = torch.cat(outs), torch.cat(hs, dim=1)
    norm = nn.utils.clip_grad_norm_(params, 0.25)
    norms.append(norm.item())
    optimizer.step()
