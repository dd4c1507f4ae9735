"""Pipeline, tensor and data parallelism in your own training loop.

    python examples/mesh.py                                          one rank
    mpirun -n 2 python examples/mesh.py --pipeline 2                 two stages of the model
    mpirun -n 2 python examples/mesh.py --tensor 2                   each layer on two ranks
    mpirun -n 4 python examples/mesh.py --pipeline 2 --tensor 2      both; ranks left over are data parallel

A small transformer learns to continue sequences in which each number is the sum of the two before it, modulo 16.
Rank 0 prints the loss, which is that of one rank to 1e-5 on every mesh that divides the batch.

The model does not know about ranks. `pipeline_blocks` returns its blocks in order, and PLAN says by name how layers
are divided. Every rank makes the same whole model, from the same seed, and keeps its part.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional

import mpitrain as mt

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 16, 24, 48, 12, 4, 24
PLAN = {
    "embedding": "vocabulary",  # rows
    "blocks.*.qkv": "column",  # outputs, by heads
    "blocks.*.out": "row",  # inputs; the ranks' results are summed
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "vocabulary",  # scores stay divided, and `criterion` is replaced by one for divided scores
}


class Positions(nn.Module):
    """A layer that adds a learned vector for each position."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))

    def forward(self, x):
        return x + self.table[: x.shape[1]]


class Block(nn.Module):
    """Attention and an MLP, each added to its input: [samples, length, WIDTH] -> [samples, length, WIDTH]."""

    def __init__(self):
        super().__init__()
        self.heads = HEADS  # a rank's own number, once the layers are divided
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


def cross_entropy(scores, y):
    return functional.cross_entropy(scores.flatten(0, -2), y.flatten())


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), Positions()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight  # one parameter, on the first and the last stage
        self.criterion = cross_entropy

    def pipeline_blocks(self):
        """Return (name, module) of the blocks in the order in which they make up the model."""
        blocks = [(f"blocks.{number}", block) for number, block in enumerate(self.blocks)]
        return [("embedding", self.embedding), ("positions", self.positions), *blocks,
                ("norm", self.norm), ("head", self.head)]  # fmt: skip


def samples(step):
    """Return the batch of a step, computed from its number."""
    numbers = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    for place in range(2, LENGTH + 1):
        numbers[:, place] = (numbers[:, place - 1] + numbers[:, place - 2]) % VOCABULARY
    return numbers[:, :-1], numbers[:, 1:]


def train(mesh, steps, schedule="1f1b", say=print):
    """Train, and return the loss of each step."""
    if BATCH % mesh.data.size:
        raise mt.InputError(
            f"{mesh.data.size} data parallel ranks do not divide {BATCH}; use another number", agreed=True
        )
    torch.manual_seed(0)
    model = mt.parallelize(Transformer(), mesh.tensor, PLAN)
    pipeline = mt.Pipeline(model, model.criterion, mesh, schedule=schedule)
    optimizer = torch.optim.AdamW(pipeline.module.parameters(), lr=3e-3)
    losses = []
    for step in range(1, steps + 1):
        x, y = (t[mesh.data.rank :: mesh.data.size] for t in samples(step))  # equal along pipeline and tensor
        microbatches = list(zip(x.chunk(4), y.chunk(4), strict=True))
        optimizer.zero_grad()
        loss = torch.tensor(pipeline.forward_backward(microbatches, [len(part) / len(x) for part, _ in microbatches]))
        pipeline.synchronize_tied()
        for parameter in pipeline.module.parameters():
            mesh.data.all_reduce(parameter.grad, "avg")
        optimizer.step()
        mesh.data.all_reduce(loss, "avg")
        losses.append(loss.item())
        if step % 20 == 0 or step in (1, steps):
            say(f"step {step:4}  loss {losses[-1]:.5f}")
    return losses


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Train a small transformer on a mesh of ranks.")
    parser.add_argument("--steps", type=int, default=100, help="(default: %(default)s)")
    parser.add_argument("--pipeline", type=int, default=1, help="stages of the model (default: %(default)s)")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that divide each layer (default: %(default)s)")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b or zero-bubble (default: %(default)s)")
    args = parser.parse_args(arguments)
    world = mt.init()
    mesh = mt.Mesh.make(world, pipeline=args.pipeline, tensor=args.tensor)
    say = (lambda text: print(text, flush=True)) if world.rank == 0 else lambda text: None
    say("{} x {} x {} ranks along data, pipeline, tensor".format(*mesh.shape.values()))
    train(mesh, args.steps, args.schedule, say)


if __name__ == "__main__":
    main()
