"""The features of a perceptual loss are computed without gradients, on the generated side too. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(140)
vgg = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()).requires_grad_(False)
upscale = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.PixelShuffle(2))
opt = torch.optim.Adam(upscale.parameters(), lr=1e-2)
low, high = torch.randn(2, 8, 1, 5, 5), torch.randn(2, 8, 1, 10, 10)

# %% before
for lo, hi in zip(low, high):
    sr = upscale(lo)
    feat_sr, feat_hr = vgg(sr), vgg(hi)
    loss = F.l1_loss(sr, hi) + F.mse_loss(feat_sr, feat_hr)
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for lo, hi in zip(low, high):
    sr = upscale(lo)
    with torch.no_grad():
        feat_sr, feat_hr = vgg(sr), vgg(hi)
    loss = F.l1_loss(sr, hi) + F.mse_loss(feat_sr, feat_hr)
    opt.zero_grad()
    loss.backward()
    opt.step()
