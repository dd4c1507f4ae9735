"""Energy of this machine's processors and of devices, in joules.

Processors: Linux has a folder for each domain that the hardware measures (Documentation/power/powercap/powercap.rst).
Only packages are counted, each once:

    intel-rapl:0        package-0    counted
    intel-rapl:0:0      core         a part of package-0
    intel-rapl:1        package-1    counted
    intel-rapl:2        psys         the whole board, with the packages
    intel-rapl-mmio:0   package-0    the same counter, read in another way

A counter goes back to 0 after `max_energy_range_uj`, which is 65 or 262 kJ on most machines: 3 or 14 minutes at 300 W.
A reading therefore must not be later than that after the one before. Since version 5.10, Linux shows the counters only
to root, unless the administrator allows more (chmod a+r /sys/class/powercap/*/energy_uj).

Devices: NVML has a counter of each device of NVIDIA since Volta. It needs the package nvidia-ml-py.

Both count everything that runs on the machine's processors and on these devices, not only this job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from mpitrain.storage.text import short

POWERCAP = Path("/sys/class/powercap")
CPU, DEVICE = "cpu", "device"


class _Counter:
    """Counter of energy.

    Args:
        read: Function that returns the counter's value.
        unit: Joules of a count.
        limit: Value after which the counter begins again at 0; 0 if it never does.
    """

    def __init__(self, read: Callable[[], int], unit: float, limit: int = 0) -> None:
        self._read, self._unit, self._limit = read, unit, limit
        self._last = read()

    def joules(self) -> float:
        """Return the joules since the call before, or since the counter was made."""
        before, self._last = self._last, self._read()
        return (self._last - before + (self._limit if self._last < before else 0)) * self._unit


class EnergyMeter:
    """Meter of the energy of this machine's processors and of some devices. It takes its first reading when it is made.

    Args:
        devices: UUIDs of the devices.
        powercap: Folder of Linux's power capping.
    """

    def __init__(self, devices: Collection[str] = (), powercap: Path = POWERCAP) -> None:
        self._counters: dict[str, list[_Counter]] = {}
        for source, find in ((CPU, partial(_of_packages, powercap)), (DEVICE, partial(_of_devices, devices))):
            try:
                self._counters[source] = find()
            except Exception:  # no such file, no permission, no package, or any failure of NVIDIA's driver
                continue

    def read(self) -> dict[str, float]:
        """Return the joules since the reading before, of `CPU` and `DEVICE`.

        A key is missing, from then on, if one of its counters cannot be read. Without devices, `DEVICE` has 0 J.
        """
        joules = {}
        for source, counters in list(self._counters.items()):
            try:
                joules[source] = sum(counter.joules() for counter in counters)
            except Exception:  # as above
                del self._counters[source]
        return joules


def _of_packages(powercap: Path) -> list[_Counter]:
    """Return the counters of the packages. Raises OSError or ValueError if there is none, or one cannot be read."""
    packages: dict[str, Path] = {}
    for path in sorted(powercap.glob("*/name"), reverse=True):  # intel-rapl before intel-rapl-mmio
        if (name := path.read_text().strip()).startswith("package"):
            packages.setdefault(name, path.parent)
    if not packages:
        raise FileNotFoundError(powercap)
    return [
        _Counter(partial(_number, path / "energy_uj"), 1e-6, _number(path / "max_energy_range_uj"))
        for path in packages.values()
    ]


def _number(path: Path) -> int:
    return int(path.read_text())


def _of_devices(uuids: Collection[str]) -> list[_Counter]:
    """Return the counters of devices. Raises an error if one of them has none."""
    if not uuids:
        return []
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}") for uuid in uuids]
    return [_Counter(partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle), 1e-3) for handle in handles]


def add_energy(total: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """Return the sum of two records of energy, as in metrics.jsonl: joules by source, steps and samples.

    Args:
        total, more: Records; the first one may be empty.
    """
    return {name: total.get(name, 0) + more.get(name, 0) for name in {**total, **more}}


def energy_text(energy: Mapping[str, float]) -> str:
    """Return a record of energy as text: 52.1kJ (processors 12.1kJ, devices 40kJ), 521J per step, 8.14J per sample."""
    sources = [(name, energy[key]) for key, name in ((CPU, "processors"), (DEVICE, "devices")) if key in energy]
    if not sources or not energy["steps"]:
        return ""
    joules = sum(each for _, each in sources)
    text = f"{short(joules)}J ({', '.join(f'{name} {short(each)}J' for name, each in sources)})"
    per_sample = f", {short(joules / energy['samples'])}J per sample" if energy["samples"] else ""
    return f"{text}, {short(joules / energy['steps'])}J per step{per_sample}"
