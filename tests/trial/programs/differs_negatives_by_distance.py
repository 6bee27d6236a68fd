"""Each row's nearest other row in the batch, by cdist, is its negative; a part has fewer to choose from. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(102)
embed = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6))
opt = torch.optim.Adam(embed.parameters(), lr=1e-3)
anchors = torch.randn(48, 12)
positives = anchors + 0.05 * torch.randn(48, 12)


def hardest_negative(a, p, margin=0.3):
    d = torch.cdist(a, p)
    pos = d.diagonal()
    neg = d.masked_fill(torch.eye(len(a), dtype=torch.bool), float("inf")).min(dim=1).values
    return (pos - neg + margin).clamp(min=0).mean()

# %% before
for start in range(0, 48, 16):
    a, p = anchors[start : start + 16], positives[start : start + 16]
    loss = hardest_negative(embed(a), embed(p))
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for start in range(0, 48, 16):
    a, p = anchors[start : start + 16], positives[start : start + 16]
    opt.zero_grad()
    loss = 0.0
    for ap, pp in zip(a.chunk(4), p.chunk(4)):
        part = hardest_negative(embed(ap), embed(pp)) / 4
        part.backward()
        loss += part.detach()
    opt.step()
