"""What a first step loads is loaded once here, and not in each copy of the process."""

from __future__ import annotations

import torch

weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.zeros(1)
torch.optim.SGD([weight], lr=0.0).step()
