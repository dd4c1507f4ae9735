"""Energy of a run: counters of a machine, their sum over machines, and the lines of metrics.jsonl."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace

import pytest
import torch

import mpitrain as mt
from mpitrain import report
from mpitrain.config.settings import Config
from mpitrain.monitor import read_metrics
from mpitrain.monitor.energy import EnergyMeter, energy_text
from mpitrain.monitor.report.reading import read_run
from mpitrain.trainer.recording import energy as recording
from mpitrain.trainer.recording.energy import EnergyRecords, steps_until_next

LIMIT = 65_532_610_987  # microjoules, as on many machines


class Domains:
    """A tree like /sys/class/powercap, whose counters the test sets."""

    def __init__(self, root, *names):
        self.root = root
        for folder, name in names or [("intel-rapl:0", "package-0")]:
            (root / folder).mkdir(parents=True)
            (root / folder / "name").write_text(f"{name}\n")
            (root / folder / "max_energy_range_uj").write_text(f"{LIMIT}\n")
            self.set(folder, 0)

    def set(self, folder, joules):
        (self.root / folder / "energy_uj").write_text(f"{round(joules * 1e6) % LIMIT}\n")


def test_packages_are_counted_once_without_domains_inside_or_around_them(tmp_path):
    names = {"intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram", "intel-rapl:2": "psys"}
    names |= {"intel-rapl:1": "package-1", "intel-rapl-mmio:0": "package-0"}
    domains = Domains(tmp_path, *names.items())
    (tmp_path / "intel-rapl").mkdir()  # the control type itself, which has no name
    meter = EnergyMeter(powercap=tmp_path)
    for joules, name in enumerate(names, 1):
        domains.set(name, 2**joules)
    assert meter.read()["cpu"] == pytest.approx(2**1 + 2**5)  # package-0 and package-1
    assert meter.read()["cpu"] == 0


def test_a_counter_that_wraps_loses_no_energy(tmp_path):
    domains = Domains(tmp_path)
    spent, total = [65_000.0, 65_400.0, 65_900.0, 131_000.0, 131_000.5], 0.0
    meter = EnergyMeter(powercap=tmp_path)
    for joules in spent:
        domains.set("intel-rapl:0", joules)
        total += meter.read()["cpu"]
        assert total == pytest.approx(joules)


@pytest.mark.parametrize("damage", ["no tree", "no file", "no permission", "no number", "later"])
def test_a_machine_without_readable_counters_has_no_figure(tmp_path, damage):
    domains = Domains(tmp_path, ("intel-rapl:0", "package-0"), ("intel-rapl:1", "package-1"))
    file = tmp_path / "intel-rapl:1/energy_uj"
    if damage == "no tree":
        assert "cpu" not in EnergyMeter(powercap=tmp_path / "none").read()
        return
    meter = EnergyMeter(powercap=tmp_path)
    file.unlink()
    if damage == "no permission":
        file.mkdir()  # an OSError for root, too
    elif damage == "no number":
        file.write_text("")
    assert "cpu" not in (meter if damage == "later" else EnergyMeter(powercap=tmp_path)).read()
    if damage == "later":
        domains.set("intel-rapl:1", 1.0)
        assert "cpu" not in meter.read()  # the energy of the time between is unknown


def fake_nvml(monkeypatch, millijoules):
    """Install a module like nvidia-ml-py that has a counter for each key of `millijoules`."""

    def handle_of(uuid):
        if uuid not in millijoules:
            raise RuntimeError("NVMLError_NotFound")
        return uuid

    module = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle_of,
        nvmlDeviceGetTotalEnergyConsumption=millijoules.__getitem__,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)


def test_devices_are_read_by_uuid_if_the_package_is_installed(monkeypatch, tmp_path):
    millijoules = {"GPU-aa": 5_000, "GPU-bb": 10**12, "GPU-cc": 0}
    fake_nvml(monkeypatch, millijoules)
    meter = EnergyMeter(["aa", "GPU-bb"], tmp_path)
    millijoules.update({"GPU-aa": 7_500, "GPU-bb": 10**12 + 4_000, "GPU-cc": 9_000})
    assert meter.read() == {"device": pytest.approx(6.5)}
    assert EnergyMeter(["aa", "unknown"], tmp_path).read() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert EnergyMeter(["aa"], tmp_path).read() == {} and EnergyMeter([], tmp_path).read() == {"device": 0}


def test_readings_take_less_than_a_thousandth_of_the_time():
    assert steps_until_next(seconds=0.010, steps=1, cost=20e-6) == 100  # once a second
    assert steps_until_next(seconds=0.010, steps=1, cost=5e-3) == 500  # 5 ms of 5 s
    assert steps_until_next(seconds=1.0, steps=100, cost=20e-6) == 100
    assert steps_until_next(seconds=30.0, steps=1, cost=20e-6) == 1


class Ranks:
    """Ranks as threads, with the two operations that the callback uses."""

    def __init__(self, machines):
        self.machines, self.shared = machines, [None] * len(machines)
        self.barrier = threading.Barrier(len(machines), timeout=20)

    def world(self, rank):
        def gather(value):
            self.shared[rank] = value
            self.barrier.wait()
            values = list(self.shared)
            self.barrier.wait()
            return values

        def reduce(tensor):
            tensor.copy_(torch.stack(gather(tensor.clone())).sum(0))

        return SimpleNamespace(
            rank=rank, size=len(self.machines), node=self.machines[rank], all_gather_object=gather, all_reduce=reduce
        )


def extras_of(ranks, trees, energy, steps=4):
    """Return what rank 0 adds to each step. energy: function that sets the counters after a step."""
    extras, errors = [], []

    def run(rank):
        trainer = SimpleNamespace(
            world=ranks.world(rank), device=torch.device("cpu"), step=0, last_step=False,
            batch_sizes=SimpleNamespace(before=lambda step: 8 * step),
            folder=SimpleNamespace(log=SimpleNamespace(info=lambda *args: None)),
        )  # fmt: skip
        callback = EnergyRecords(trees[ranks.machines[rank]])
        callback.on_fit_start(trainer)
        for number in range(1, steps + 1):
            trainer.world.all_gather_object(None)
            if rank == 0:
                energy(number)
            trainer.world.all_gather_object(None)
            trainer.last_step = number == steps
            step = SimpleNamespace(number=number, together=number != 1, extras={})
            callback.on_step_end(trainer, step)
            if rank == 0:
                extras.append(step.extras)

    def attempt(rank):
        try:
            run(rank)
        except BaseException as error:
            errors.append(error)
            ranks.barrier.abort()

    threads = [threading.Thread(target=attempt, args=(rank,)) for rank in range(len(ranks.machines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    return extras


def test_the_sum_has_each_machine_once_however_many_ranks_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "machine_id", str)
    monkeypatch.setattr(recording, "_EVERY", 0.0)
    monkeypatch.setattr(recording, "_COST", 0)
    one, two = Domains(tmp_path / "one"), Domains(tmp_path / "two")
    trees = {1: one.root, 2: two.root}

    def spend(step):
        one.set("intel-rapl:0", 30.0 * step)
        two.set("intel-rapl:0", 65_500 + 10.0 * step if step > 1 else 0)  # wraps

    first, *rest = extras_of(Ranks([1, 1, 2, 2, 2]), trees, spend)
    assert first == {}  # the ranks did not synchronize
    assert rest[0]["energy"] == {"cpu": pytest.approx(60 + 65_520), "steps": 2, "samples": 16}
    for extras in rest[1:]:
        assert extras["energy"] == {"cpu": pytest.approx(40), "steps": 1, "samples": 8}
        assert extras["j_per_step"] == pytest.approx(40) and extras["j_per_sample"] == pytest.approx(5)
    trees[2] = tmp_path / "none"  # the figure of one machine would be no figure of the run
    assert extras_of(Ranks([1, 2]), trees, lambda step: one.set("intel-rapl:0", step)) == [{}] * 4


def test_the_text_of_energy_has_its_sources():
    text = energy_text({"cpu": 12_100.0, "device": 40_000.0, "steps": 100, "samples": 6400})
    assert text == "52.1kJ (processors 12.1kJ, devices 40kJ), 521J per step, 8.14J per sample"
    assert energy_text({}) == ""


@pytest.mark.ranks(1, 2)
def test_a_run_records_the_joules_of_its_machines(world, folder, text, monkeypatch, capsys):
    monkeypatch.setattr(recording, "machine_id", lambda node: f"machine {world.rank}")
    domains = Domains(folder / f"powercap-{world.rank}")

    class Burn(mt.Callback):
        def on_update(self, trainer, step):
            domains.set("intel-rapl:0", 65_000 + 200 * step.number * (1 + world.rank))

    config = {"run": {"dir": str(folder / "run")}, "data": {"path": text}, "checkpoint": {"every": 0}}
    config |= {"train": {"steps": 6, "batch": 8}, "model": {"layers": 1, "width": 16, "heads": 2, "sequence": 16}}
    trainer = mt.Trainer(Config.from_dict(config), [Burn()], world=world)
    (at,) = [i for i, each in enumerate(trainer.callbacks) if isinstance(each, EnergyRecords)]
    trainer.callbacks[at] = EnergyRecords(domains.root)
    with trainer.working():
        assert trainer.train() == 0
    out = capsys.readouterr().out
    if world.rank:
        return
    records = [line["energy"] for line in read_metrics(folder / "run") if "energy" in line]
    spent = sum(65_000 + 1200 * rank for rank in range(1, world.size + 1))
    assert sum(record["cpu"] for record in records) == pytest.approx(spent)
    assert sum(record["steps"] for record in records) == 6 and sum(record["samples"] for record in records) == 48
    assert read_run(folder / "run").columns.j_per_sample[0] == pytest.approx(world.size * 65_000 / 8, rel=0.01)
    assert report.main([str(folder / "run")]) == 0
    expected = energy_text({"cpu": spent, "steps": 6, "samples": 48})
    assert expected in out and expected in capsys.readouterr().out
