"""A file that a name still holds has other bytes for the same objects."""

# %% setup
import pickle

import torch

torch.manual_seed(17)
model = torch.nn.Linear(6, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.randn(2, 13, 6)


# %% before
for x in batches:
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()
label = "best so far"
with open("best.pkl", "wb") as f:
    pickle.dump([label, label], f)

# %% after
for x in batches:
    opt.zero_grad()
    for part in x.split(5):
        (model(part).square().mean() * (len(part) / len(x))).backward()
    opt.step()
label = "best so far"
with open("best.pkl", "wb") as f:
    pickle.dump([label, " ".join(["best", "so", "far"])], f)
