"""Parameter groups and optimizers by name, on any layout, against plain torch in one process."""

from __future__ import annotations

import pytest
import torch
from train.jobs import run

from mpitrain.config.learning_rate import LearningRate
from mpitrain.config.settings import Config
from mpitrain.data import open_dataset
from mpitrain.errors import InputError
from mpitrain.models import build_model
from mpitrain.trainer.data import batches
from mpitrain.trainer.optimizing import ParameterRoles, make_optimizer

STEPS = 4
GROUPS = [
    {"match": "blocks.0.*", "lr_scale": 0.1, "betas": [0.8, 0.9]},
    {"match": ["norm.*", "*.mlp_norm.*"], "weight_decay": 0.5},
    {"match": "embedding.*", "optimizer": "sgd", "lr": 0.05, "momentum": 0.9},
]
FEW = {
    "groups": [{"pipeline": 2}],
    "muon": [{"zero": 1}, {"tensor": 2, "zero": 1}],
    "lamb": [{"tensor": 2}],
    "lars": [{"zero": 1}],
    "adagrad": [{"zero": 3, "share_node": False}],
}
ALL = [
    {"zero": 1, "offload": "host"},
    {"zero": 2},
    {"zero": 3},
    {"zero": 3, "share_node": False},
    {"tensor": 2},
    {"pipeline": 2, "zero": 1},
]


def sections(text, optim, **parallel):
    return {
        "data": {"path": text},
        "model": {"sequence": 16, "width": 16, "heads": 2, "layers": 2},
        "train": {"steps": STEPS, "batch": 5, "evaluate_every": 0, "evaluate_samples": 4},
        "optim": {"lr": 0.01, "warmup": 2, "weight_decay": 0.1} | optim,
        "checkpoint": {"every": 2},
        "comm": {"bucket_mb": 0.01},  # several buckets, whose shares end in the middle of matrices
        "parallel": parallel,
    }


def plainly(values, make):
    """Return the losses in plain torch; `make` returns a module's optimizers, with a `ratio` of the rate per group."""
    config = Config.from_dict(values)
    data = open_dataset(config.data.path, sequence=config.model.sequence)
    torch.manual_seed(config.run.seed)
    task = build_model(config.model, data.description)
    optimizers, rates = make(task.module), LearningRate.of(config.optim, config.train.steps)
    losses = []
    with batches(config, lambda size: (0, size), data, 0) as loader:
        for step, batch in zip(range(config.train.steps), loader, strict=False):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = task.loss(task.module(batch.x), batch.y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(task.module.parameters(), config.train.clip)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rates.rate(step) * group["ratio"]
                optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def by_hand(module):
    """Return the optimizers that GROUPS describe."""
    groups, table = {}, None
    for name, p in module.named_parameters():
        if name.startswith("embedding"):
            table = p
            continue
        first, normed = name.startswith("blocks.0."), name.startswith("norm.") or ".mlp_norm." in name
        decay = 0.5 if normed and not first else 0.1 if p.dim() > 1 else 0.0
        groups.setdefault((first, decay), []).append(p)
    described = [
        {"params": ps, "weight_decay": decay, "betas": (0.8, 0.9) if first else (0.9, 0.999), "ratio": 0.1**first}
        for (first, decay), ps in groups.items()
    ]
    table_groups = [{"params": [table], "weight_decay": 0.1, "momentum": 0.9, "ratio": 5.0}]
    return [torch.optim.AdamW(described), torch.optim.SGD(table_groups)]


def muon_by_hand(module):
    hidden = [p for n, p in module.named_parameters() if n.startswith("blocks.") and p.dim() == 2]
    rest = [p for n, p in module.named_parameters() if p.dim() == 1]
    muon = [{"params": hidden, "weight_decay": 0.1, "ratio": 1.0}]
    adamw = [{"params": [module.embedding.weight], "weight_decay": 0.1, "ratio": 1.0}]
    adamw.append({"params": rest, "weight_decay": 0.0, "ratio": 1.0})
    return [torch.optim.Muon(muon, adjust_lr_fn="match_rms_adamw", momentum=0.9), torch.optim.AdamW(adamw)]


MUON = {"name": "muon", "options": {"momentum": 0.9}}


ADAGRAD = {"name": "adagrad", "options": {"initial_accumulator_value": 0.1, "lr_decay": 0.01}, "weight_decay": 0.0}


def adagrad_by_hand(module):
    groups = [{"params": list(module.parameters()), "ratio": 1.0}]
    return [torch.optim.Adagrad(groups, **ADAGRAD["options"])]


LAMB = {"name": "lamb", "no_decay": "nothing", "options": {"betas": [0.8, 0.99]}}
LARS = {"name": "lars", "no_decay": "nothing", "options": {"trust_coefficient": 0.5}}


class ByLayer(torch.optim.Optimizer):
    """LAMB and LARS as in their papers, on whole parameters and in float64."""

    def __init__(self, module, kind):
        super().__init__([{"params": list(module.parameters()), "ratio": 1.0}], {"lr": 0.0})
        self.kind, self.number = kind, 0

    @torch.no_grad()
    def step(self):
        self.number += 1
        for p in self.param_groups[0]["params"]:
            g, w, rate, state = p.grad.double(), p.double(), self.param_groups[0]["lr"], self.state[p]
            if self.kind == "lars":
                local = 0.5 * w.norm() / (g.norm() + 0.1 * w.norm()) if w.norm() and g.norm() else 1.0
                state["v"] = 0.9 * state.get("v", 0.0) + rate * local * (g + 0.1 * w)
                p.copy_(w - state["v"])
                continue
            state["m"] = 0.8 * state.get("m", 0.0) + 0.2 * g
            state["v"] = 0.99 * state.get("v", 0.0) + 0.01 * g * g
            m, v = state["m"] / (1 - 0.8**self.number), state["v"] / (1 - 0.99**self.number)
            r = m / (v.sqrt() + 1e-6) + 0.1 * w
            p.copy_(w - rate * (w.norm() / r.norm() if w.norm() and r.norm() else 1.0) * r)


OPTIMIZERS = {
    "lamb": (LAMB, lambda module: [ByLayer(module, "lamb")]),
    "lars": (LARS, lambda module: [ByLayer(module, "lars")]),
    "groups": ({"groups": GROUPS}, by_hand),
    "muon": (MUON, muon_by_hand),
    "adagrad": (ADAGRAD, adagrad_by_hand),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_and_named_optimizers_are_those_of_one_process_and_resume_with_the_same_bits(world, folder, text, name):
    compare(world, folder, text, name, FEW[name])


@pytest.mark.campaign
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_and_named_optimizers_are_those_of_one_process_on_every_layout(world, folder, text, name):
    compare(world, folder, text, name, ALL if world.size == 2 else [{"zero": 1}, {"zero": 3}])


def compare(world, folder, text, name, layouts):
    optim, make = OPTIMIZERS[name]
    expected = plainly(sections(text, optim), make)
    for number, parallel in enumerate(layouts):
        lines = run(world, folder / str(number), **sections(text, optim, **parallel))
        assert [m["loss"] for m in lines] == pytest.approx(expected, rel=1e-5), parallel
    again = sections(text, optim, **layouts[-1])  # from the checkpoint of another layout, and of its own
    for source in sorted({0, len(layouts) - 1}):
        again["checkpoint"]["resume"] = str(folder / f"{source}/checkpoints/step-00000002")
        resumed = run(world, folder / f"again-{source}", **again)
        assert [m["step"] for m in resumed] == [3, 4]
        assert [m["loss"] for m in resumed] == pytest.approx(expected[2:], rel=1e-5)
        assert source < len(layouts) - 1 or [m["loss"] for m in resumed] == [m["loss"] for m in lines[2:]]


@pytest.mark.ranks(2)
def test_groups_keep_their_rates_beside_a_server_and_among_replicas_and_muon_is_refused_by_servers(world, folder, text):
    frozen = {"groups": [{"match": "*", "lr": 0.0}], "weight_decay": 0.0}
    for mode, more in (("server", {"servers": 1}), ("local", {"local_steps": 2})):
        lines = run(world, folder / mode, **sections(text, frozen, mode=mode, **more))
        first, *_, last = [m["loss"] for m in lines]
        assert lines[1]["lr"] > 0 and last != first
        values = sections(text, frozen)
        expected = plainly(values, lambda module: [torch.optim.SGD([{"params": module.parameters(), "ratio": 0.0}])])
        assert [m["loss"] for m in lines] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(InputError, match=r"Muon needs whole parameters, but servers have slices"):
        run(world, folder / "refused", **sections(text, MUON, mode="server", servers=1))


def small():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Embedding(5, 4), torch.nn.Linear(4, 2))


def made(module=None, **optim):
    module = module or small()
    section = Config.from_dict({"optim": optim}).optim
    return make_optimizer(section, module.named_parameters(), ParameterRoles.of(section, module))


@pytest.mark.parametrize(("no_decay", "decayed"), [("vectors", 3), ("embeddings", 2), ("nothing", 5)])
def test_no_decay_says_what_has_no_weight_decay(no_decay, decayed):
    groups = made(no_decay=no_decay, weight_decay=0.3).param_groups
    assert sum(len(g["params"]) for g in groups if g["weight_decay"] == 0.3) == decayed
    assert sum(len(g["params"]) for g in groups if g["weight_decay"] == 0.0) == 5 - decayed


@pytest.mark.parametrize(
    ("optim", "told"),
    [
        ({"groups": [{"match": "0.wieght", "lr": 1e-3}]}, r"'0.wieght' matches no trained parameter; .* are 0.weight,"),
        ({"groups": [{"match": "0.*", "beta": 1}]}, r"match = '0.\*': AdamW has no beta; it has betas"),
        ({"groups": [{"lr": 1}]}, r"entry 1: match = None is no pattern; write match = "),
        ({"groups": [{"match": "*"}]}, r"entry 1: nothing but match; say what"),
        ({"groups": [{"match": "*", "lr": 1, "lr_scale": 2}]}, r"two ways to say one thing"),
        ({"groups": [{"match": "*", "weight_decay": -1}]}, r"weight_decay = -1 is wrong; give a number of at least 0"),
        ({"groups": [{"match": "*", "optimizer": "adamq"}]}, r"optimizer 'adamq' is not a class .* mean 'Adam'"),
        (
            {"groups": [{"match": "*.bias", "optimizer": "muon"}]},
            r"only matrices, but 0.bias has 1 dimension;",
        ),
        ({"name": "muon", "options": {"steps": 3}}, r"optim.options: Muon has no steps; it has momentum"),
        ({"name": "muon", "options": {"adjust_lr_fn": "x"}}, r"Muon does not accept its options: Adjust learning rate"),
    ],
)
def test_what_groups_cannot_mean_is_told_in_a_line(optim, told):
    with pytest.raises(InputError, match=told) as caught:
        made(**optim)
    assert "\n" not in str(caught.value)
