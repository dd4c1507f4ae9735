"""Padded sentences of an IterableDataset, masked means, accumulation, clipping, a schedule per step, early stopping."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Sentences(IterableDataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        for _ in range(self.n):
            yield torch.randint(1, 12, (int(torch.randint(3, 9, (1,), generator=g)),), generator=g)


def collate(sentences):
    tokens = nn.utils.rnn.pad_sequence(sentences, batch_first=True)
    return {
        "tokens": tokens,
        "lengths": torch.tensor([len(s) for s in sentences]),
        "ids": [str(len(s)) for s in sentences],
    }


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(12, 8, padding_idx=0), nn.LayerNorm(8)
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, 12)

    def forward(self, x):
        return self.out(self.mix(self.norm(self.embedding(x)), src_key_padding_mask=x == 0))


model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=9)
best, patience = float("inf"), 0
for epoch in range(3):
    model.train()
    for i, batch in enumerate(DataLoader(Sentences(53, 1), batch_size=9, collate_fn=collate)):
        tokens = batch["tokens"]
        mask = tokens != 0
        each = F.cross_entropy(model(tokens).transpose(1, 2), tokens * 3 % 12, reduction="none")
        loss = (each * mask).sum() / mask.sum() / 2
        loss.backward()
        if (i + 1) % 2 == 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            print(
                f"{epoch} {i} loss {loss * 2:.12f} norm {norm:.12f} lr {scheduler.get_last_lr()[0]:.10f} {batch['ids']}"
            )
    model.eval()
    right = count = 0
    with torch.no_grad():
        for batch in DataLoader(Sentences(20, 2), batch_size=6, collate_fn=collate):
            tokens = batch["tokens"]
            mask = tokens != 0
            right += (model(tokens).argmax(-1) == tokens * 3 % 12)[mask].sum().item()
            count += mask.sum().item()
    print(f"{epoch}: {right}/{count}, mean length {batch['lengths'].double().mean():.6f}")
    if 1 - right / count < best:
        best, patience = 1 - right / count, 0
    else:
        patience += 1
    if patience >= 1:
        print("early stop")
        break
torch.save(model.state_dict(), "tagger.pt")
