"""The tensors that a forward saves for the backward pass are kept on the host."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(45)
vit = nn.Sequential(
    nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Flatten(), nn.Linear(128, 5)
)
opt = torch.optim.AdamW(vit.parameters(), lr=1e-3)
img, lab = torch.randn(2, 16, 3, 8, 8), torch.randint(0, 5, (2, 16))

# %% before
for x, y in zip(img, lab):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(vit(x), y)
    loss.backward()
    opt.step()

# %% after
for x, y in zip(img, lab):
    opt.zero_grad()
    with torch.autograd.graph.save_on_cpu():
        loss = nn.functional.cross_entropy(vit(x), y)
    loss.backward()
    opt.step()
