"""The average of the weights (EMA) is moved once per batch, after the step, while the batch runs in parts."""

# %% setup
import copy

import torch
from torch import nn

torch.manual_seed(13)


class EMA:
    def __init__(self, model, decay=0.9):
        self.shadow, self.decay, self.updates = copy.deepcopy(model), decay, 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        for slow, fast in zip(self.shadow.parameters(), model.parameters()):
            slow.lerp_(fast, 1 - self.decay)


denoiser = nn.Sequential(nn.Linear(11, 32), nn.Mish(), nn.Linear(32, 10))
ema = EMA(denoiser)
optimizer = torch.optim.Adam(denoiser.parameters(), lr=2e-3)
x0 = torch.randn(3, 16, 10)

# %% before
for batch in x0:
    t = torch.rand(len(batch), 1)
    noise = torch.randn_like(batch)
    noisy = (1 - t) * batch + t * noise
    pred = denoiser(torch.cat([noisy, t], dim=1))
    loss = nn.functional.smooth_l1_loss(pred, noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update(denoiser)

# %% after
for batch in x0:
    t = torch.rand(len(batch), 1)
    noise = torch.randn_like(batch)
    noisy = (1 - t) * batch + t * noise
    optimizer.zero_grad()
    preds, loss = [], 0.0
    for n, t_, e in zip(noisy.chunk(2), t.chunk(2), noise.chunk(2)):
        pred = denoiser(torch.cat([n, t_], dim=1))
        half = nn.functional.smooth_l1_loss(pred, e) / 2
        half.backward()
        preds.append(pred.detach())
        loss += half.detach()
    pred = torch.cat(preds)
    optimizer.step()
    ema.update(denoiser)
