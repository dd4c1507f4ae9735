"""Picture of the rooms of the package, docs/rooms.svg, drawn from the layers in setup.cfg: `python docs/rooms.py`."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDTH, HEIGHT, GAP, LEFT, EDGE = 900, 46, 12, 8, 8  # of the picture, a row, and what is between
COLOURS = ("#dbe9f6", "#d3ecea", "#cfe6d4", "#dcf0d0", "#e9f3c9", "#f4f1cf", "#fdf0cf", "#fbe6d8", "#f3e3f0")
WORDS = {
    "__main__": "the command mpitrain", "jobs": "scripts for Slurm and PBS", "completion": "of shells",
    "train": "the main job", "evaluate": "figures", "generate": "text", "predict": "of samples", "report": "charts",
    "doctor": "in order?", "plan": "which layout", "adapters": "of LoRA", "bench": "gone: says where",
    "run": "user scripts",
    "measuring": "measurements by users: collectives, algorithms, the machine",
    "inference": "text and predictions from trained models",
    "trainer": "Trainer, callbacks, run folder, engine, users' loops, modes",
    "loading": "trained models out of run folders",
    "speeds": "how fast this machine is",
    "planner": "seconds and bytes of layouts, without ranks",
    "parallel": "the axes: data, pipeline, tensor, and their rules",
    "loose": "parameter server, averages of replicas",
    "horovod": "interface of Horovod on comm: its operations, optimizer, elastic state",
    "deepspeed": "DeepSpeed's names",
    "backend": "torch.distributed", "data": "HDF5", "models": "gpt, resnet, HF", "shard": "DDP, ZeRO", "pipe": "stages",
    "tensor": "divided layers", "checkpoint": "HDF5", "monitor": "what is seen",
    "layers": "what PyTorch lacks",
    "layout": "ranks along the axes; which rank owns which slice of a tensor",
    "config": "every setting, declared once",
    "comm": "collectives, memory, failures; the only room that calls MPI",
    "storage": "locks, commits of folders, hashes",
    "early": "before torch is imported", "choices": "names that settings choose from",
    "errors": "one line: what is wrong, how to fix it",
}  # fmt: skip


def layers() -> list[list[str]]:
    """Return the rooms of each layer, highest layer first."""
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    lines = parser["importlinter:contract:rooms"]["layers"].split("\n")
    return [[name.strip() for name in line.split("|")] for line in lines if line.strip()]


def drawn() -> str:
    """Return the picture as SVG. A room imports from the rows below it."""
    rows = layers()
    height = len(rows) * (HEIGHT + GAP) + 2 * EDGE - GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"',
        ' font-family="sans-serif" text-anchor="middle"><title>Rooms import from the rows below them</title>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, row in enumerate(rows):
        top, wide = EDGE + number * (HEIGHT + GAP), (WIDTH - 2 * LEFT + GAP) / len(row)
        for place, room in enumerate(row):
            left, box = LEFT + place * wide, wide - GAP
            path = ROOT / "mpitrain" / room
            name, middle = f"{room}/" if (path / "__init__.py").exists() else f"{room}.py", left + box / 2
            out += [
                f'<rect x="{left:.1f}" y="{top}" width="{box:.1f}" height="{HEIGHT}" rx="5" stroke="#888888"',
                f' fill="{COLOURS[number % len(COLOURS)]}"/>',
                f'<text x="{middle:.1f}" y="{top + 19}" font-size="13" font-weight="bold">{name}</text>',
                f'<text x="{middle:.1f}" y="{top + 36}" font-size="11">{WORDS[room]}</text>',
            ]
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    (ROOT / "docs/rooms.svg").write_text(drawn(), encoding="utf-8")
