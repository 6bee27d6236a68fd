"""Style is told by a Gram matrix over batch and channels together, so rows meet each other in it. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(210)
loss_net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).requires_grad_(False)
transformer = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 3, 3))
optimizer = torch.optim.Adam(transformer.parameters(), lr=1e-2)
photos = torch.rand(2, 8, 3, 6, 6)


def gram(f):
    n, c, h, w = f.shape
    flat = f.transpose(0, 1).reshape(c, n * h * w)
    return flat @ flat.T / (n * c * h * w)


style = gram(loss_net(torch.rand(1, 3, 6, 6)))
agg_content, agg_style = [], []

# %% before
def stylize(x):
    optimizer.zero_grad()
    feats = loss_net(transformer(x))
    content_loss = F.mse_loss(feats, loss_net(x))
    style_loss = 1e4 * F.mse_loss(gram(feats), style)
    (content_loss + style_loss).backward()
    optimizer.step()
    agg_content.append(content_loss.item())
    agg_style.append(style_loss.item())


for batch in photos:
    stylize(batch)

# %% after
def stylize(x):
    optimizer.zero_grad()
    sums = torch.zeros(2)
    for part in x.split(2):
        feats = loss_net(transformer(part))
        content_loss = F.mse_loss(feats, loss_net(part)) / 4
        style_loss = 1e4 * F.mse_loss(gram(feats), style) / 4
        (content_loss + style_loss).backward()
        sums += torch.stack([content_loss, style_loss]).detach()
    optimizer.step()
    agg_content.append(sums[0].item())
    agg_style.append(sums[1].item())


for batch in photos:
    stylize(batch)
