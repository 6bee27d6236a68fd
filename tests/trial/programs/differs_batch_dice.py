"""Dice is a quotient of sums over the whole batch of masks, not a mean of the rows' own. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(156)
seg = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 1))
opt = torch.optim.Adam(seg.parameters(), lr=1e-2)
ct, organ = torch.randn(2, 16, 1, 6, 6), (torch.rand(2, 16, 1, 6, 6) < torch.linspace(0.02, 0.9, 16).view(1, 16, 1, 1, 1)).float()


class DiceLoss(nn.Module):
    def forward(self, logits, target, smooth=1.0):
        p = torch.sigmoid(logits).view(-1)
        t = target.reshape(-1)
        return 1 - (2 * (p * t).sum() + smooth) / (p.sum() + t.sum() + smooth)


criterion = DiceLoss()

# %% before
for image, mask in zip(ct, organ):
    opt.zero_grad()
    loss = criterion(seg(image), mask)
    loss.backward()
    opt.step()

# %% after
for image, mask in zip(ct, organ):
    opt.zero_grad()
    loss = 0.0
    for ip, mp in zip(image.chunk(4), mask.chunk(4)):
        part = criterion(seg(ip), mp) / 4
        part.backward()
        loss += part.detach()
    opt.step()
