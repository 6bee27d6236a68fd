"""CLIP's loss takes the other rows of the batch as negatives, by a product of all with all. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(150)


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(12, 6), nn.Sequential(nn.EmbeddingBag(30, 8), nn.Linear(8, 6))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, captions):
        i, t = F.normalize(self.image(images), dim=-1), F.normalize(self.text(captions), dim=-1)
        logits = self.logit_scale.exp() * i @ t.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


clip = CLIP()
opt = torch.optim.AdamW(clip.parameters(), lr=1e-3)
photos, captions = torch.randn(2, 16, 12), torch.randint(0, 30, (2, 16, 5))

# %% before
for image, caption in zip(photos, captions):
    loss = clip(image, caption)
    opt.zero_grad()
    loss.backward()
    opt.step()

# %% after
for image, caption in zip(photos, captions):
    opt.zero_grad()
    loss = 0.0
    for ip, cp in zip(image.chunk(2), caption.chunk(2)):
        part = clip(ip, cp) / 2
        part.backward()
        loss += part.detach()
    opt.step()
