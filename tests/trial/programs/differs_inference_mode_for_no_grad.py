"""Features made in inference_mode, where no_grad stood, cannot be trained on afterwards. Visible in the first step."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(218)
frozen, probe = nn.Sequential(nn.Linear(9, 12), nn.ReLU()), nn.Linear(12, 3)
opt = torch.optim.SGD(probe.parameters(), lr=0.1)
x, y = torch.randn(32, 9), torch.randint(0, 3, (32,))

# %% before
with torch.no_grad():
    features = torch.cat([frozen(rows) for rows in x.split(16)])
for f, t in zip(features.split(16), y.split(16)):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(probe(f), t)
    loss.backward()
    opt.step()

# %% after
with torch.inference_mode():
    features = torch.cat([frozen(rows) for rows in x.split(16)])
for f, t in zip(features.split(16), y.split(16)):
    opt.zero_grad()
    loss = nn.functional.cross_entropy(probe(f), t)
    loss.backward()
    opt.step()
