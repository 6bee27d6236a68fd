"""The head's weight is the embedding's no longer: equal in value after the step, but another tensor from now on. Visible after one step."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(400)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.mix, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.wte(ids))))


lm = LM()
opt = torch.optim.SGD(lm.parameters(), lr=0.1)
ids = torch.randint(0, 20, (16, 6))

# %% before
opt.zero_grad()
loss = nn.functional.cross_entropy(lm(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
loss.backward()
opt.step()

# %% after
opt.zero_grad()
loss = nn.functional.cross_entropy(lm(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
loss.backward()
opt.step()
untied = nn.Parameter(lm.wte.weight.detach().clone())
untied.grad = lm.wte.weight.grad
lm.head.weight = untied
