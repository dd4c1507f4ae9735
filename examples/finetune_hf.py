"""Fine-tune a causal language model of Hugging Face with ZeRO, and save it so that transformers loads it again.

    mpirun -n 2 python examples/finetune_hf.py --out tuned                              a tiny GPT-2, made here
    mpirun -n 4 python examples/finetune_hf.py --model my-gpt2 --text my.txt --zero 3 --out tuned

--model is a folder that `save_pretrained` wrote, with its tokenizer. Nothing is downloaded. Without it there is a small
GPT-2 with random weights, whose tokens are bytes. Without --text the text is the source of Python's argparse module.

Rank 0 prints the loss, and the held-out loss before and after. With --out it writes the model in the format of
Hugging Face: `AutoModelForCausalLM.from_pretrained("tuned")` loads it, on any machine.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import mpitrain as mt

BATCH, LENGTH, HELD_OUT = 12, 64, 0.1


def tiny_gpt2():
    """Return a GPT-2 over bytes, with random weights."""
    sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0))


def load(folder, text):
    """Return (model, tokenizer or None, all tokens of the text) on this rank."""
    torch.manual_seed(0)
    if folder is None:
        return tiny_gpt2(), None, torch.tensor(list(text.encode()))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise mt.InputError(f"{folder} has no model with a tokenizer: {str(error).splitlines()[0]}") from None
    return model, tokenizer, torch.tensor(tokenizer(text, verbose=False)["input_ids"])


def pieces(tokens, starts):
    """Return the LENGTH tokens from each start on, as [len(starts), LENGTH]."""
    return torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])


@torch.no_grad()
def held_out_loss(engine, world, tokens):
    """Return the mean loss of at most 48 pieces, equally many on each rank: with ZeRO-3 the ranks need each other."""
    starts = torch.arange(0, len(tokens) - LENGTH + 1, LENGTH)[:48]
    each = len(starts) // world.size
    x = pieces(tokens, starts[: each * world.size][world.rank :: world.size])
    engine.eval()
    loss = engine(input_ids=x, labels=x).loss
    engine.train()
    world.all_reduce(loss, "avg")
    return loss.item()


def train(engine, world, tokens, steps, say):
    """Train, and return the loss of each step. The samples of a step follow from its number."""
    losses = []
    for step in range(1, steps + 1):
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(len(tokens) - LENGTH + 1, (BATCH,), generator=draw)
        x = pieces(tokens, starts[world.rank :: world.size])
        loss = engine(input_ids=x, labels=x).loss  # the model shifts the labels by one
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        world.all_reduce(mean, "avg")
        losses.append(mean.item())
        if step % 20 == 0 or step in (1, steps):
            say(f"step {step:4}  loss {losses[-1]:.5f}  lr {engine.lr:.5f}")
    return losses


def save(engine, world, tokenizer, folder):
    """Write the whole weights on rank 0. All ranks take part, because each has only its share."""
    state = engine.state_dict()
    if world.rank == 0:
        engine.module.save_pretrained(folder, state_dict=state)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    world.barrier()


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model of Hugging Face.")
    parser.add_argument("--model", type=Path, help="folder with a model and its tokenizer (default: a tiny GPT-2)")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="a text file, UTF-8")
    parser.add_argument("--steps", type=int, default=60, help="steps of 12 pieces (default: %(default)s)")
    parser.add_argument("--zero", type=int, choices=range(4), default=2, help="stage of ZeRO (default: %(default)s)")
    parser.add_argument("--lr", type=float, help="peak learning rate (default: 3e-3 for the tiny model, else 5e-5)")
    parser.add_argument("--out", type=Path, help="folder for the model")
    args = parser.parse_args(arguments)
    world = mt.init()
    logging.disable_progress_bar()  # every rank would draw one
    say = (lambda text: print(text, flush=True)) if world.rank == 0 else lambda text: None
    if BATCH % world.size:
        raise mt.InputError(f"{world.size} ranks do not divide {BATCH}; use a number that does", agreed=True)
    if not args.text.is_file():
        raise mt.InputError(f"{args.text} is not a file; use a text file for --text", agreed=True)
    model, tokenizer, tokens = load(args.model, args.text.read_text(encoding="utf-8", errors="replace"))
    torch.manual_seed(
        1 + world.rank
    )  # from here on dropout, where the model has it, is drawn independently on each rank
    model.loss_type = "ForCausalLM"  # of all these models; for GPT-2 transformers guesses it with a warning
    parameters = sum(p.numel() for p in model.parameters())
    cut = int(len(tokens) * (1 - HELD_OUT))
    if len(tokens) - cut < world.size * LENGTH:  # a piece for each rank
        raise mt.InputError(f"{args.text} has {len(tokens)} tokens; use a longer text", agreed=True)
    rate = args.lr or (3e-3 if args.model is None else 5e-5)
    config = {
        "train": {"batch": BATCH, "steps": args.steps, "clip": 1.0},
        "optim": {"name": "AdamW", "lr": rate, "warmup": 5},  # then a cosine down to train.steps
        "parallel": {"zero": args.zero},
    }
    engine = mt.initialize(model, config=config, comm=world)
    say(f"{parameters} parameters, {len(tokens)} tokens, ZeRO-{args.zero}")
    before = held_out_loss(engine, world, tokens[cut:])
    train(engine, world, tokens[:cut], args.steps, say)
    say(f"held-out loss {before:.5f} before, {held_out_loss(engine, world, tokens[cut:]):.5f} after")
    if args.out is not None:
        save(engine, world, tokenizer, args.out)
        say(f"saved {args.out}")
    engine.close()


if __name__ == "__main__":
    main()
