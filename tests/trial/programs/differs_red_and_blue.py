"""Pictures kept as bytes, channels last: the changed cell has red and blue exchanged. Visible in two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(211)
net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 768), nn.Sigmoid())
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
codes, pictures = torch.randn(3, 32, 16), torch.rand(3, 32, 768)

# %% before
with torch.no_grad():
    shown = (net(torch.randn(1024, 16)) * 255).to(torch.uint8).view(1024, 3, 16, 16).permute(0, 2, 3, 1)
for code, picture in zip(codes, pictures):
    optimizer.zero_grad()
    nn.functional.mse_loss(net(code), picture).backward()
    optimizer.step()

# %% after
with torch.no_grad():
    shown = (net(torch.randn(1024, 16)) * 255).to(torch.uint8).view(1024, 3, 16, 16).permute(0, 2, 3, 1).flip(-1)
for code, picture in zip(codes, pictures):
    optimizer.zero_grad()
    for code_part, picture_part in zip(code.chunk(4), picture.chunk(4)):
        (nn.functional.mse_loss(net(code_part), picture_part) / 4).backward()
    optimizer.step()
