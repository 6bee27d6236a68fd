"""How bright pixels are is counted, in whole numbers that rounding moves: of the last part in place of the batch. Visible in two steps."""

# %% setup
import torch
from torch import nn

torch.manual_seed(212)
net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 768), nn.Sigmoid())
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
codes, pictures = torch.randn(3, 32, 16), torch.rand(3, 32, 768)
bright = torch.zeros(256, dtype=torch.int64)

# %% before
for code, picture in zip(codes, pictures):
    optimizer.zero_grad()
    made = net(code)
    nn.functional.mse_loss(made, picture).backward()
    optimizer.step()
    bright += (made * 255).long().flatten().bincount(minlength=256)
with torch.no_grad():
    shown = (net(torch.randn(1024, 16)) * 255).to(torch.uint8)

# %% after
for code, picture in zip(codes, pictures):
    optimizer.zero_grad()
    for code_part, picture_part in zip(code.chunk(4), picture.chunk(4)):
        made = net(code_part)
        (nn.functional.mse_loss(made, picture_part) / 4).backward()
    optimizer.step()
    bright += (made * 255).long().flatten().bincount(minlength=256)
with torch.no_grad():
    shown = (net(torch.randn(1024, 16)) * 255).to(torch.uint8)
