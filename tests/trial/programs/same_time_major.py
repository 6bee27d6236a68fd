"""In a time-major language model the batch is the second dimension, and its columns are the parts, hidden state too."""

# %% setup
import torch
import torch.nn as nn

torch.manual_seed(43)
ntokens, bptt = 30, 6
corpus = torch.randint(0, ntokens, (19, 16))
encoder, rnn, decoder = nn.Embedding(ntokens, 8), nn.LSTM(8, 12), nn.Linear(12, ntokens)
model = nn.ModuleDict({"encoder": encoder, "rnn": rnn, "decoder": decoder})
criterion = nn.NLLLoss()
lr = 1.0


def forward(data, hidden):
    out, hidden = rnn(encoder(data), hidden)
    return decoder(out).log_softmax(-1).view(-1, ntokens), hidden

# %% before
hidden = (torch.zeros(1, 16, 12), torch.zeros(1, 16, 12))
total_loss = 0.0
for i in range(0, corpus.size(0) - 1, bptt):
    data, target = corpus[i : i + bptt], corpus[i + 1 : i + 1 + bptt].reshape(-1)
    model.zero_grad()
    hidden = tuple(h.detach() for h in hidden)
    output, hidden = forward(data, hidden)
    loss = criterion(output, target)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)
    total_loss += loss.item()
print(f"loss {total_loss / 3:5.2f}")

# %% after
hidden = (torch.zeros(1, 16, 12), torch.zeros(1, 16, 12))
total_loss = 0.0
for i in range(0, corpus.size(0) - 1, bptt):
    data, target = corpus[i : i + bptt], corpus[i + 1 : i + 1 + bptt].reshape(-1)
    model.zero_grad()
    outputs, states, loss = [], [], 0.0
    for columns in torch.arange(16).split(4):
        state = tuple(h[:, columns].detach() for h in hidden)
        out, state = forward(data[:, columns], state)
        part = criterion(out, target.view(data.shape)[:, columns].reshape(-1)) * (len(columns) / 16)
        part.backward()
        outputs.append(out.detach().view(len(data), len(columns), ntokens))
        states.append([h.detach() for h in state])
        loss = loss + part.detach()
    output = torch.cat(outputs, dim=1).view(-1, ntokens)
    hidden = tuple(torch.cat(h, dim=1) for h in zip(*states))
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-lr)
    total_loss += loss.item()
print(f"loss {total_loss / 3:5.2f}")
