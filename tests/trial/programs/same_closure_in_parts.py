"""The closure that optimizer.step() calls accumulates the gradients of parts and returns the whole loss."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(38)
sine = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
t = torch.linspace(-3, 3, 48).unsqueeze(1)
wave = torch.sin(2 * t)
opt = torch.optim.LBFGS(sine.parameters(), lr=0.1, max_iter=3)
calls = []

# %% before
def closure():
    opt.zero_grad()
    loss = nn.functional.mse_loss(sine(t), wave)
    loss.backward()
    calls.append(loss.item())
    return loss


for i in range(2):
    loss = opt.step(closure)

# %% after
def closure():
    opt.zero_grad()
    loss = torch.zeros(())
    for tp, wp in zip(t.chunk(3), wave.chunk(3)):
        part = nn.functional.mse_loss(sine(tp), wp) / 3
        part.backward()
        loss = loss + part.detach()
    calls.append(loss.item())
    return loss


for i in range(2):
    loss = opt.step(closure)
