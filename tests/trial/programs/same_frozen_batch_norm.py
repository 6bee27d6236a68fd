"""Fine-tuning with the backbone's batch norm in eval mode: each row is normalised by the stored statistics."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(39)
backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
with torch.no_grad():
    backbone(torch.randn(32, 3, 8, 8))  # gives the statistics
head = nn.Linear(24, 2)
for module in backbone.modules():
    if isinstance(module, nn.BatchNorm2d):
        module.eval()
optimizer = torch.optim.Adam([{"params": backbone.parameters(), "lr": 1e-4}, {"params": head.parameters(), "lr": 1e-2}])
cats, is_cat = torch.randn(40, 3, 8, 8), torch.randint(0, 2, (40,))

# %% before
for k in range(0, 40, 20):
    xb, yb = cats[k : k + 20], is_cat[k : k + 20]
    optimizer.zero_grad()
    out = head(backbone(xb))
    loss = nn.functional.cross_entropy(out, yb)
    loss.backward()
    optimizer.step()
    print(f"{k} loss={loss.item():.5f} acc={(out.argmax(1) == yb).float().mean().item():.2f}")

# %% after
for k in range(0, 40, 20):
    xb, yb = cats[k : k + 20], is_cat[k : k + 20]
    optimizer.zero_grad()
    out, loss = [], 0.0
    for rows in (slice(0, 7), slice(7, 14), slice(14, 20)):
        logits = head(backbone(xb[rows]))
        micro = nn.functional.cross_entropy(logits, yb[rows], reduction="sum") / len(xb)
        micro.backward()
        out.append(logits.detach())
        loss += micro.detach()
    out = torch.cat(out)
    optimizer.step()
    print(f"{k} loss={loss.item():.5f} acc={(out.argmax(1) == yb).float().mean().item():.2f}")
