"""Machine profiles: read from a file, merged from several, written from a data sheet."""

from __future__ import annotations

import pytest

from mpitrain.errors import InputError
from mpitrain.planner.machine import (
    BIT_RATE,
    BYTE_RATE,
    BYTES,
    COUNT,
    ELEMENTS,
    FRACTION,
    OPERATIONS,
    SECONDS,
    Measured,
    merge,
    profile_of,
    read_machine,
    read_values,
    ready_made_machines,
    write_values,
)

SHEET = """
[node]
cores = 32
memory = "128 GiB"
memory_bandwidth = "200 GB/s"
[core]
matrix = "50 Gflop/s"
[network]
latency = "1.5 us"
bandwidth = "100 Gbit/s"
"""


@pytest.fixture
def sheet(tmp_path):
    path = tmp_path / "sheet.toml"
    path.write_text(SHEET)
    return path


@pytest.mark.serial
@pytest.mark.parametrize(
    ("unit", "written", "value"),
    [
        (BYTES, "256 GiB", 256 << 30),
        (BYTES, "40GB", 40e9),
        (BYTE_RATE, "100 Gbit/s", 12.5e9),
        (BYTE_RATE, "100 Gb/s", 12.5e9),
        (BYTE_RATE, "100 Gbps", 12.5e9),
        (BYTE_RATE, "1.5 TB/s", 1.5e12),
        (BIT_RATE, 12.5e9, 12.5e9),
        (SECONDS, "2 µs", 2e-6),
        (SECONDS, "0.5 ms", 5e-4),
        (OPERATIONS, "312 TFLOPS", 312e12),
        (ELEMENTS, "300 M/s", 3e8),
        (FRACTION, "90 %", 0.9),
        (COUNT, 128, 128),
    ],
)
def test_quantities_are_read_and_written_with_units(unit, written, value):
    assert unit.parse(written, "here") == pytest.approx(value)
    assert unit.parse(unit.text(value), "here") == pytest.approx(value, rel=1e-3)


@pytest.mark.serial
def test_missing_values_are_derived_from_a_data_sheet(sheet):
    machine = read_machine(sheet)
    assert (machine.name, machine.cores, machine.links.cores, machine.memory) == ("sheet", 32, 32, 128 << 30)
    assert machine.links.bandwidth == 12.5e9 and machine.links.memory_rate == 100e9  # a copy reads and writes
    assert machine.update_rate == pytest.approx(200e9 / 32 / 28)
    speeds = [rate for _, rate in machine.matrix["bf16"]]
    assert speeds == sorted(speeds) and 0.99 * 50e9 < speeds[-1] <= 50e9
    assert machine.device is None and machine.collectives == ()


@pytest.mark.serial
def test_a_written_profile_is_read_back(tmp_path):
    rows = [Measured("all_reduce", "ring", 4, 2, "private", 1 << 16, 2e-5)]
    rows.append(Measured("broadcast", "mpi", 2, 1, "arena", 16, 1e-6))
    values = merge(read_values("gpu-4"), {"name": 'a "b"\\', "collectives": {row[:-1]: row.seconds for row in rows}})
    machine = profile_of(values, "here")
    first, second = tmp_path / "1.toml", tmp_path / "2.toml"
    write_values(values, first)
    again = read_machine(first)
    assert again.collectives == tuple(rows) and again.name == 'a "b"\\'
    assert again.links == machine.links and again.device.link_rate == machine.device.link_rate
    assert again.device.memory == pytest.approx(machine.device.memory, rel=1e-3)  # four digits of GiB
    write_values(read_values(str(first)), second)
    assert read_machine(second) == again and second.read_text() == first.read_text()


@pytest.mark.serial
def test_a_later_file_overrides_single_keys(sheet, tmp_path):
    network = tmp_path / "network.toml"
    network.write_text(
        '[network]\nbandwidth = "200 Gbit/s"\n[collectives."all_reduce ring"]\n'
        '"4 ranks on 2 nodes, arena" = { "64 KiB" = "20 us" }\n'
    )
    machine = read_machine(f"{sheet},{network}")
    assert machine.links.bandwidth == 25e9 and machine.links.latency == 1.5e-6 and machine.cores == 32
    assert machine.collectives == (Measured("all_reduce", "ring", 4, 2, "arena", 65536, 2e-5),)
    ring = ("all_reduce", "ring", 4, 2, "arena")
    more = {"collectives": {(*ring, 65536): 3e-5, (*ring, 4096): 1e-6}}
    assert merge(read_values(str(network)), more)["collectives"] == more["collectives"]
    rows = profile_of(merge(read_values(str(sheet)), more), "here").collectives
    assert [(row.nbytes, row.seconds) for row in rows] == [(65536, 3e-5), (4096, 1e-6)]
    write_values(read_values(str(network)), tmp_path / "again.toml")  # nothing that is derived gets in
    assert read_values(str(tmp_path / "again.toml")) == read_values(str(network)) | {"name": "network"}


@pytest.mark.serial
def test_ready_made_profiles_match_their_names():
    assert ready_made_machines() == ["cpu-128", "gpu-4", "gpu-8", "gpu-8x8"]
    for name in ready_made_machines():
        machine = read_machine(name)
        assert "data sheet" in machine.origin
        count = machine.cores if machine.device is None else machine.device.count
        assert name.removesuffix("x8").endswith(f"-{count:g}")
        tables = [machine.matrix, *([machine.device.matrix] if machine.device else [])]
        assert all(set(table) == {"fp32", "bf16", "fp16"} for table in tables)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SHEET.replace("latency", "latncy"), ["'network.latncy'", "did you mean 'network.latency'?"]),
        ('[netwerk]\nlatency = "1 us"', ["'netwerk'", "did you mean 'network'?"]),
        (SHEET + 'threads = "90 %"', ["'network.threads'", "did you mean 'core.threads'?"]),
        (SHEET.replace("100 Gbit/s", "100 Gbit"), ["network.bandwidth = '100 Gbit'", "100 Gbit/s"]),
        (SHEET.replace("cores = 32", "cores = 0"), ["node.cores = 0", "write it as 128"]),
        (SHEET.replace("cores = 32", ""), ["node.cores is missing", "[node]"]),
        (SHEET.replace('matrix = "50 Gflop/s"', ""), ["core.matrix is missing"]),
        (SHEET.replace("matrix =", "matrix.fp8 ="), ["core.matrix.fp8 is not a precision", "bf16"]),
        (SHEET + '[device]\nkind = "some"\ncount = 4', ["device.memory is missing"]),
        (SHEET + '[collectives."all_reduce ring"]\nhere = 3', ["'here' is wrong", "4 ranks on 2 nodes"]),
        ("cores = 3", ["unknown key 'cores'", "node.cores"]),
        ("[node", ["is not TOML"]),
    ],
)
def test_errors_in_a_file_are_reported_in_one_line(text, words, sheet):
    sheet.write_text(text)
    with pytest.raises(InputError) as raised:
        read_machine(sheet)
    error = str(raised.value)
    assert raised.value.agreed and "\n" not in error and all(word in error for word in ["sheet.toml", *words]), error


@pytest.mark.serial
def test_a_missing_profile_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"did you mean 'gpu-[48]'"):
        read_machine("gpu-6")
    with pytest.raises(InputError, match="does not exist"):
        read_machine(tmp_path / "none.toml")
