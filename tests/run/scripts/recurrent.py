"""Character LSTM with a state that is carried on, a GRU with the sequence first, and sampling from the model."""

import torch
from torch import nn

text = "the quick brown fox jumps over the lazy dog. " * 9
letters = sorted(set(text))
data = torch.tensor([letters.index(c) for c in text])
data = data[: len(data) // 5 * 5].view(5, -1)


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(len(letters), 8), nn.LSTM(8, 12, 2, batch_first=True)
        self.out = nn.Linear(12, len(letters))

    def forward(self, x, state):
        y, state = self.lstm(self.embedding(x), state)
        return self.out(y.reshape(-1, y.size(2))), state


model = Characters()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
state = torch.zeros(2, 5, 12), torch.zeros(2, 5, 12)
for i in range(0, 40, 8):
    inputs, targets = data[:, i : i + 8], data[:, i + 1 : i + 9]
    output, state = model(inputs, [s.detach() for s in state])
    loss = nn.CrossEntropyLoss()(output, targets.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    print(f"{loss.item():.12f} {norm:.12f}")
with torch.no_grad():
    state, c, word = (torch.zeros(2, 1, 12), torch.zeros(2, 1, 12)), data[0, :1].view(1, 1), ""
    for _ in range(12):
        output, state = model(c, state)
        c = torch.multinomial(output.softmax(-1), 1)
        word += letters[c.item()]
print(repr(word))
gru, head, deep = nn.GRU(3, 6), nn.Linear(6, 2), nn.GRU(6, 4, 2, batch_first=True, dropout=0.3)
optimizer = torch.optim.SGD([*gru.parameters(), *head.parameters(), *deep.parameters()], 0.1)
for _ in range(2):
    output, last = gru(torch.randn(4, 7, 3))
    loss = head(last[0]).square().mean() + output.mean() + deep(output.transpose(0, 1))[0].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
torch.save({"model": model.state_dict(), "gru": gru.state_dict(), "deep": deep.state_dict()}, "recurrent.pt")
