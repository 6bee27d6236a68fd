"""CTC's mean divides each row by its own target's length and then by the rows, so parts weigh by rows."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(34)
acoustic = nn.LSTM(6, 10)
to_chars = nn.Linear(10, 8)
params = [*acoustic.parameters(), *to_chars.parameters()]
opt = torch.optim.SGD(params, lr=0.05)
ctc = nn.CTCLoss(blank=0)
audio = torch.randn(14, 32, 6)
targets, target_lengths = torch.randint(1, 8, (32, 4)), torch.randint(1, 5, (32,))

# %% before
for start in range(0, 32, 16):
    rows = slice(start, start + 16)
    opt.zero_grad()
    log_probs = to_chars(acoustic(audio[:, rows])[0]).log_softmax(2)
    input_lengths = torch.full((16,), 14)
    loss = ctc(log_probs, targets[rows], input_lengths, target_lengths[rows])
    loss.backward()
    opt.step()

# %% after
for start in range(0, 32, 16):
    rows = slice(start, start + 16)
    opt.zero_grad()
    input_lengths = torch.full((16,), 14)
    found, loss = [], 0.0
    for r in torch.arange(32)[rows].split(7):
        log_probs = to_chars(acoustic(audio[:, r])[0]).log_softmax(2)
        part = ctc(log_probs, targets[r], input_lengths[: len(r)], target_lengths[r]) * len(r) / 16
        part.backward()
        found.append(log_probs.detach())
        loss += part.detach()
    log_probs = torch.cat(found, dim=1)
    opt.step()
