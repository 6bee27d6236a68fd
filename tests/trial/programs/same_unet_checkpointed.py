"""The two widest stages of a U-Net with group norm are recomputed in the backward pass."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(5)


def double_conv(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(2, cout), nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1), nn.GroupNorm(2, cout), nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = double_conv(1, 4), double_conv(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.merge, self.final = double_conv(8, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x):
        d1 = self.down1(x)
        d2 = self.down2(F.max_pool2d(d1, 2))
        return self.final(self.merge(torch.cat([self.up(d2), d1], 1)))


def dice(logits, mask):
    p = torch.sigmoid(logits)
    return 1 - 2 * (p * mask).sum() / (p.sum() + mask.sum() + 1)


scans, masks = torch.randn(16, 1, 12, 12), (torch.rand(16, 1, 12, 12) > 0.7).float()
unet = UNet()
optimizer = torch.optim.SGD(unet.parameters(), lr=0.1, momentum=0.9)

# %% setup after
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(5)


def double_conv(cin, cout):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(2, cout), nn.ReLU(inplace=True),
        nn.Conv2d(cout, cout, 3, padding=1), nn.GroupNorm(2, cout), nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = double_conv(1, 4), double_conv(4, 8)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.merge, self.final = double_conv(8, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x):
        d1 = checkpoint(self.down1, x, use_reentrant=False)
        d2 = self.down2(F.max_pool2d(d1, 2))
        return self.final(checkpoint(self.merge, torch.cat([self.up(d2), d1], 1), use_reentrant=False))


def dice(logits, mask):
    p = torch.sigmoid(logits)
    return 1 - 2 * (p * mask).sum() / (p.sum() + mask.sum() + 1)


scans, masks = torch.randn(16, 1, 12, 12), (torch.rand(16, 1, 12, 12) > 0.7).float()
unet = UNet()
optimizer = torch.optim.SGD(unet.parameters(), lr=0.1, momentum=0.9)

# %% before
for epoch in range(2):
    pred = unet(scans)
    loss = F.binary_cross_entropy_with_logits(pred, masks) + dice(pred, masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.5f}")

# %% after
for epoch in range(2):
    pred = unet(scans)
    loss = F.binary_cross_entropy_with_logits(pred, masks) + dice(pred, masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.5f}")
