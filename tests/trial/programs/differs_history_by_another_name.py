"""Predictions that a second name leads to are made without a graph. Visible in the first run: one gradient is gone."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(97)
teacher, student = nn.Linear(5, 3), nn.Linear(5, 3)
opt = torch.optim.SGD([*teacher.parameters(), *student.parameters()], lr=0.1)
xs = torch.randn(3, 8, 5)
outs = []
seen = outs

# %% before
for x in xs:
    outs.append(teacher(x))
    loss = (student(x) - seen[-1]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for x in xs:
    with torch.no_grad():
        outs.append(teacher(x))
    loss = (student(x) - seen[-1]).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
