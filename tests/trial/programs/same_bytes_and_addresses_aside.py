"""A file that a name still holds has other bytes for the same objects, and a table goes by the addresses of objects."""

# %% setup
import pickle
import weakref

import torch

torch.manual_seed(17)
model = torch.nn.Linear(6, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.randn(2, 13, 6)


class Figure:
    def __init__(self):
        self.parents, self.lines = {}, []

    def draw(self):
        line = Figure()
        self.lines.append(line)
        self.parents[id(line)] = weakref.ref(line)


fig = Figure()

# %% before
for x in batches:
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()
    fig.draw()
label = "best so far"
with open("best.pkl", "wb") as f:
    pickle.dump([label, label], f)

# %% after
for x in batches:
    opt.zero_grad()
    for part in x.split(5):
        (model(part).square().mean() * (len(part) / len(x))).backward()
    opt.step()
    taken = [torch.empty(3) for _ in range(7)]
    fig.draw()
label = "best so far"
with open("best.pkl", "wb") as f:
    pickle.dump([label, " ".join(["best", "so", "far"])], f)
