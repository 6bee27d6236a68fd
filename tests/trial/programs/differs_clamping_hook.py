"""A hook on each parameter clamps its gradient, each part's on its own in place of their sum. Visible in two steps."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(104)
rnn = nn.RNN(4, 12, batch_first=True)
decoder = nn.Linear(12, 1)
parameters = [*rnn.parameters(), *decoder.parameters()]
for p in parameters:
    p.register_hook(lambda grad: torch.clamp(grad, -0.02, 0.02))
optimizer = torch.optim.SGD(parameters, lr=0.5)
seq, goal = torch.randn(32, 6, 4), torch.randn(32, 1)

# %% before
for i in range(0, 32, 16):
    optimizer.zero_grad()
    hidden = rnn(seq[i : i + 16])[0][:, -1]
    loss = nn.functional.mse_loss(decoder(hidden), goal[i : i + 16])
    loss.backward()
    optimizer.step()

# %% after
for i in range(0, 32, 16):
    optimizer.zero_grad()
    states, loss = [], torch.zeros(())
    for j in range(i, i + 16, 4):
        hidden = rnn(seq[j : j + 4])[0][:, -1]
        part = nn.functional.mse_loss(decoder(hidden), goal[j : j + 4]) / 4
        part.backward()
        states.append(hidden.detach())
        loss += part.detach()
    hidden = torch.cat(states)
    optimizer.step()
