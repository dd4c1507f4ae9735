"""HDF5, NetCDF and Zarr: the samples are those that NumPy computes from the arrays, in a copy and in place."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import struct

import h5py
import numpy as np
import pytest
from fuzzed_files import variables_file, zarr_store

from mpitrain.data import open_dataset, read_manifest
from mpitrain.data.in_place import PlacedArrays, read_index, verify_in_place
from mpitrain.data.prepare import PrepareOptions, prepare
from mpitrain.data.sources import held_out_mask
from mpitrain.data.sources.file_reader import FileReader
from mpitrain.data.split_rows import SplitRows, count, divide_rows, rows_of, sample_mask
from mpitrain.errors import InputError


def samples(folder, split="train"):
    data = open_dataset(folder, split)
    return data.read(np.arange(len(data)))


def prepared(sources, out, held_out=0.0, **options):
    prepare([str(source) for source in sources], out, held_out=held_out, options=PrepareOptions(**options))
    return out


def contents(folder):
    paths = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
    return [(path, path.read_bytes(), os.stat(path).st_mtime_ns) for path in paths]


def test_rows_of_a_split_follow_the_rule_of_held_out_rows():
    for rows in (1, 2, 3, 19, 20, 21, 100, 1003):
        for fraction in (0.05, 0.07, 1 / 3, 0.5):
            held = held_out_mask(0, rows, fraction)
            splits = divide_rows(rows, 0, fraction, 0)
            for name, expected in (("held_out", np.flatnonzero(held)), ("train", np.flatnonzero(~held))):
                assert count(splits[name]) == len(expected)
                assert rows_of(splits[name], np.arange(len(expected))).tolist() == expected.tolist()
                assert np.flatnonzero(sample_mask(splits[name], 0, rows)).tolist() == expected.tolist()
    pairs = divide_rows(100, 0, 0.1, 6)
    assert pairs == {"train": SplitRows(first=0, stop=79), "held_out": SplitRows(first=85, stop=94)}


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_pairs_of_states_from_netcdf_files_are_unpacked_and_normalised(tmp_path, filters, in_place):
    source = tmp_path / "years"
    source.mkdir()
    for year in (2001, 2002):
        variables_file(source / f"{year}.nc", filters=filters, first=12 * (year - 2001))
    before = contents(source)
    folder = prepared([source], tmp_path / "set", 0.2, x=("t2m", "z"), ahead=3, scale="standard", in_place=in_place)
    states = []
    for year in (2001, 2002):
        with h5py.File(source / f"{year}.nc") as file:
            states.append(np.stack([file["t2m"][...], file["z"][...] * 0.5], 1))
    states = np.concatenate(states)
    splits = divide_rows(24, 0, 0.2, 3)
    train = states[splits["train"].first : splits["train"].stop]
    scaled = (states - train.mean((0, 2, 3), keepdims=True)) / train.std((0, 2, 3), keepdims=True)
    for name, split in splits.items():
        x, y = samples(folder, name)
        np.testing.assert_allclose(x, scaled[split.first : split.stop], rtol=0, atol=1e-6)
        np.testing.assert_allclose(y, scaled[split.first + 3 : split.stop + 3], rtol=0, atol=1e-6)
    first = (read_manifest(folder).variables or ())[0]
    assert (first.name, first.units, first.dimensions) == ("t2m", "K", ("lat", "lon"))
    assert contents(source) == before


@pytest.mark.parametrize("version", [2, 3])
def test_a_zarr_store_in_place_has_the_samples_of_its_copy_and_of_arrays(tmp_path, version):
    store = tmp_path / "v.zarr"
    zarr_store(store, version)
    before = contents(store)
    x, y = np.arange(36, dtype="f4").reshape(12, 3), np.arange(12) % 3
    np.savez(tmp_path / "v.npz", x=x, y=y)
    folders = [prepared([store], tmp_path / f"set-{in_place}", 0.2, in_place=in_place) for in_place in (False, True)]
    for split in ("train", "held_out"):
        expected = samples(prepared([tmp_path / "v.npz"], tmp_path / f"npz-{split}", 0.2), split)
        for folder in folders:
            for some, others in zip(samples(folder, split), expected, strict=True):
                assert some.dtype == others.dtype and np.array_equal(some, others)
    assert contents(store) == before and not list(verify_in_place(folders[1], read_manifest(folders[1])))


def test_missing_numbers_are_refused_or_replaced(tmp_path):
    variables_file(tmp_path / "v.nc", filters=True)
    with h5py.File(tmp_path / "v.nc", "a") as file:
        file["z"][5, 1, 2], file["t2m"][2, 0, 0] = -99, np.nan
    with pytest.raises(InputError, match=r"variable z of .*v\.nc, row 5 or a later one: 1 numbers are missing"):
        prepared([tmp_path / "v.nc"], tmp_path / "set", x=("z",), y=("t2m",))
    assert not (tmp_path / "set").exists()
    folder = prepared([tmp_path / "v.nc"], tmp_path / "set", x=("z",), y=("t2m",), missing="mean", in_place=True)
    with h5py.File(tmp_path / "v.nc") as file:
        z = np.where(file["z"][...] == -99, np.nan, file["z"][...] * 0.5)
    x, y = samples(folder)
    assert x[5, 1, 2] == pytest.approx(np.nanmean(z), abs=1e-6) and np.isfinite(y).all()
    again = prepared([tmp_path / "v.nc"], tmp_path / "again", x=("z",), y=("t2m",), like=folder)
    assert np.array_equal(samples(again)[0], x)


MARKS = {  # stored numbers, attributes, and the rows of missing ones
    "two marks": (np.array([1, -9999, 1e20, 2], "f4"), {"_FillValue": 1e20, "missing_value": -9999.0}, [1, 2]),
    "a mark and NaN": (np.array([1, -9999, np.nan, 2], "f4"), {"_FillValue": np.nan, "missing_value": -9999.0}, [1, 2]),
    "several marks": (np.array([1, -999, 3, -99], "i2"), {"missing_value": np.array([-99, -999], "i2")}, [1, 3]),
    "marks beyond the dtype": (np.array([1, 2, 255, 0], "u1"), {"_FillValue": -1, "missing_value": 1e20}, []),
}


@pytest.mark.parametrize("case", MARKS)
def test_all_marks_of_missing_numbers_count(tmp_path, case):
    stored, attributes, missing = MARKS[case]
    with h5py.File(tmp_path / "v.nc", "w") as file:
        file["x"] = stored
        file["x"].attrs.update(attributes | {"scale_factor": 0.5})
    x, y = samples(prepared([tmp_path / "v.nc"], tmp_path / "set", x=("x",), ahead=1, missing="zero"))
    expected = stored * np.float32(0.5)
    expected[missing] = 0
    assert x.tolist() == expected[:-1].tolist() and y.tolist() == expected[1:].tolist()


def test_a_file_in_place_that_was_changed_moved_or_replaced_is_refused(tmp_path):
    variables_file(tmp_path / "v.nc", filters=False)
    whole = (tmp_path / "v.nc").read_bytes()
    folder = prepared([tmp_path / "v.nc"], tmp_path / "set", x=("t2m",), ahead=1, in_place=True)
    with h5py.File(tmp_path / "v.nc", "a") as file:
        file["t2m"][7, 1, 1] += 1
    with pytest.raises(InputError, match=r"v\.nc, variable t2m, rows 0 to 11 was changed or damaged after"):
        samples(folder)
    assert len(list(verify_in_place(folder, read_manifest(folder)))) == 1
    (tmp_path / "v.nc").write_bytes(whole + b"more")
    with pytest.raises(InputError, match="bytes where the index says"):
        samples(folder)
    (tmp_path / "v.nc").unlink()
    with pytest.raises(InputError, match="No such file"):
        samples(folder)


ERRORS = {
    "no x": ({}, "choose x with --x NAME; its variables are t2m [12, 3, 4], u [12, 2], z [12, 3, 4]"),
    "no y": ({"x": ("z",)}, "choose y with --y NAME, or pairs of states with --ahead N"),
    "a name": ({"x": ("t3m",), "ahead": 1}, "--x t3m does not exist; its variables are t2m"),
    "an axis": ({"x": ("z",), "ahead": 1, "samples": "depth"}, "set --samples to one of its axes: time, lat, lon"),
    "in place": ({"x": ("z",), "y": ("t2m",), "samples": "lat", "in_place": True}, "the axis of samples first"),
    "unsigned": ({"x": ("u",), "ahead": 1}, "cannot be read: its numbers have the attribute _Unsigned"),
    "far": ({"x": ("z",), "ahead": 12}, "--ahead 12 is too far for 12 states"),
    "twice": ({"x": ("z", "t2m", "/z"), "ahead": 1}, "--x names variable z twice; name each variable once"),
    "median": ({"x": ("z",), "ahead": 1, "missing": "median"}, "--missing median is for tables"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_unsuitable_variables_are_refused_in_one_line(tmp_path, case):
    variables_file(tmp_path / "v.nc", filters=False)
    with h5py.File(tmp_path / "v.nc", "a") as file:
        file["u"] = np.zeros((12, 2), "i1")
        file["u"].attrs["_Unsigned"] = "true"
    options, message = ERRORS[case]
    with pytest.raises(InputError) as refused:
        prepared([tmp_path / "v.nc"], tmp_path / "set", **options)
    assert message in str(refused.value) and not [path for path in tmp_path.iterdir() if "set" in path.name]


def test_samples_along_another_axis_and_files_of_a_test_set(tmp_path):
    for name, first in (("train.nc", 0), ("test.nc", 12)):
        variables_file(tmp_path / name, filters=False, first=first)
    sources = [tmp_path / "train.nc", tmp_path / "test.nc"]
    folder = prepared(sources, tmp_path / "set", 0.05, x=("t2m",), y=("z",), samples="lon")
    for name, split in (("train.nc", "train"), ("test.nc", "held_out")):
        with h5py.File(tmp_path / name) as file:
            x, y = samples(folder, split)
            assert np.array_equal(x, np.moveaxis(file["t2m"][...], 2, 0))
            assert np.array_equal(y, np.moveaxis(file["z"][...] * np.float32(0.5), 2, 0))


def test_ranges_of_axes_are_selected_by_name_over_all_files(tmp_path):
    for name, first in (("a.nc", 0), ("b.nc", 12), ("test.nc", 24)):
        variables_file(tmp_path / name, filters=True, first=first)
    options = {"x": ("t2m",), "ahead": 1, "select": ("time=9:16", "lat=1:")}
    sources = [tmp_path / name for name in ("a.nc", "b.nc", "test.nc")]
    folder = prepared(sources, tmp_path / "set", **options)
    whole = [h5py.File(path)["t2m"][:, 1:] for path in sources]
    states = np.concatenate([whole[0][9:], whole[1][:4]])
    for split, expected in (("train", states), ("held_out", whole[2])):
        x, y = samples(folder, split)
        assert np.array_equal(x, expected[:-1]) and np.array_equal(y, expected[1:])
    only_second = prepared(sources[:2], tmp_path / "second", **(options | {"select": ("time=12:20",)}))
    assert len(read_manifest(only_second).variables or ()) == 2 and len(samples(only_second)[0]) == 7
    for select, message in (
        (("depth=0:3",), "use AXIS=FIRST:STOP with an axis of all files, such as lat, lon, time"),
        (("time=90:",), "selects nothing of the axis, whose length is 24"),
    ):
        with pytest.raises(InputError, match=message):
            prepared(sources, tmp_path / "none", **(options | {"select": select}))


def test_the_mark_of_missing_numbers_that_xarray_writes_into_zarr_3_is_understood(tmp_path):
    zarr_store(tmp_path / "v.zarr", 3)
    meta = tmp_path / "v.zarr/x/zarr.json"
    mark = base64.b64encode(struct.pack("<d", 7.0)).decode()
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"attributes": {"_FillValue": mark}}))
    x, _ = samples(prepared([tmp_path / "v.zarr"], tmp_path / "set", missing="zero"))
    assert x[2].tolist() == [6, 0, 8]


def test_unusual_variables_do_not_matter_unless_they_are_chosen(tmp_path):
    zarr_store(tmp_path / "v.zarr", 3)
    meta = tmp_path / "v.zarr/y/zarr.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"data_type": "string"}))
    with pytest.raises(InputError, match=r"variable y of .* cannot be read: its metadata is damaged or unusual"):
        prepared([tmp_path / "v.zarr"], tmp_path / "set")
    assert len(samples(prepared([tmp_path / "v.zarr"], tmp_path / "set", x=("x",), ahead=1))[0]) == 11


def test_a_damaged_chunk_of_a_zarr_store_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    zarr_store(tmp_path / "v.zarr", 3)
    folder = prepared([tmp_path / "v.zarr"], tmp_path / "set", in_place=True)
    spec, chunk = read_manifest(folder).in_place, tmp_path / "v.zarr/x/c/1/0"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    monkeypatch.setattr(PlacedArrays, "_zarr_rows", lambda self, array, first, stop: pytest.fail("decoded"))
    with pytest.raises(InputError, match=r"variable x, rows 4 to 7 was changed or damaged after it was indexed"):
        PlacedArrays("set", spec, read_index(folder, spec)).block(0, 1)


def test_a_library_that_crashes_costs_one_line(tmp_path):
    variables_file(tmp_path / "v.nc", filters=False)
    reader = FileReader()
    reader.variables(tmp_path / "v.nc")
    os.kill(reader._process.pid, signal.SIGSEGV)
    with pytest.raises(InputError, match=r"v\.nc is damaged: the library that reads it crashes; restore it"):
        reader.variables(tmp_path / "v.nc")
    variable = reader.variables(tmp_path / "v.nc")["t2m"]  # by another process
    assert reader.rows(variable, 1, 0, 2).shape == (2, 12, 4)


FILES = {  # what differs in a.nc and b.nc, each with times 0 to 11 if nothing else is said; message, or the note
    "time backwards": ({"first": 12}, {}, "the coordinates time do not increase over all files"),
    "dates backwards": ({"units": "hours since 2000-02-01"}, {"units": "hours since 2000-01-31 12:00:00"}, "increase"),
    "dates": ({"units": "hours since 2000-01-31"}, {"units": "minutes since 2000-01-31 12:00"}, "has steps of 0.01"),
    "a leap day": ({"units": "days since 2000-02-29"}, {"units": "days since 2000-03-11"}, "do not increase"),
    "no leap day": (
        {"units": "days since 2000-02-28", "calendar": "noleap"},
        {"units": "days since 2000-03-12", "calendar": "noleap"},
        None,
    ),
    "months": (
        {"units": "months since 2000-01-01"},
        {"units": "months since 2001-01-01"},
        "order of the files was not",
    ),
    "a direction": ({}, {"first": 12, "lat": np.arange(3.0)[::-1]}, "coordinates lat run in the opposite direction to"),
    "places": ({}, {"first": 12, "lat": np.arange(3.0) + 5}, "the coordinates lat of "),
    "an order": ({}, {"first": 12, "order": ("time", "lon", "lat")}, "has the axes time, lon, lat, but variable z"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_of_pairs_are_joined_only_in_the_order_of_time_and_with_equal_axes(tmp_path, case):
    *changes, message = FILES[case]
    for name, change in zip(("a.nc", "b.nc"), changes, strict=True):
        variables_file(tmp_path / name, filters=False, first=change.get("first", 0))
        with h5py.File(tmp_path / name, "a") as file:
            file["time"].attrs.update({key: change[key] for key in ("units", "calendar") if key in change})
            file["lat"][...] = change.get("lat", file["lat"][...])
            if order := change.get("order"):
                del file["z"]
                file["z"] = np.zeros((12, 4, 3), "i2")
                for axis, scale in enumerate(order):
                    file["z"].dims[axis].attach_scale(file[scale])
    arguments = [tmp_path / "a.nc", tmp_path / "b.nc"], tmp_path / "set"
    if case in ("dates", "no leap day", "months", "places"):
        notes = read_manifest(prepared(*arguments, x=("z",), ahead=1)).origin.notes
        assert message in notes[0] if message else not notes
    else:
        with pytest.raises(InputError, match=message):
            prepared(*arguments, x=("z",), ahead=1)
    if case == "an order":
        with h5py.File(tmp_path / "a.nc", "a") as file:
            file["t"] = np.zeros((12, 3, 4))
            for axis, scale in enumerate(("time", "lon", "lat")):
                file["t"].dims[axis].label = scale
        with pytest.raises(InputError, match=r"variable t of .* has the axes lon, lat, but variable z of .* lat, lon;"):
            prepared([tmp_path / "a.nc"], tmp_path / "set", x=("z", "t"), ahead=1)


def test_nothing_is_unpickled_and_no_link_into_another_file_is_followed(tmp_path):
    zarr_store(tmp_path / "v.zarr", 2)
    path = tmp_path / "v.zarr/x/.zarray"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"filters": [{"id": "pickle"}]}))
    with pytest.raises(InputError, match="its codec pickle is none of those"):
        prepared([tmp_path / "v.zarr"], tmp_path / "set")
    shutil.rmtree(tmp_path / "v.zarr")
    np.arange(24.0).tofile(tmp_path / "secret")
    variables_file(tmp_path / "v.nc", filters=False)
    with h5py.File(tmp_path / "links.h5", "w") as file:
        file["x"] = h5py.ExternalLink("v.nc", "t2m")
        file.create_dataset("y", (12, 2), "f8", external=[(str(tmp_path / "secret"), 0, h5py.h5f.UNLIMITED)])
    for name, message in (("x", "it is a link into another file"), ("y", "its numbers lie in other files")):
        with pytest.raises(InputError, match=f"variable {name} of .*links.h5 cannot be read: {message}"):
            prepared([tmp_path / "links.h5"], tmp_path / "set", x=(f"/{name}",), ahead=1)


def test_a_file_that_is_not_hdf5_or_needs_a_filter_is_refused_with_advice(tmp_path):
    (tmp_path / "v.h5").write_bytes(b"no HDF5" * 99)
    with pytest.raises(InputError, match=r"v\.h5 is damaged \(.*file signature not found\)\); restore it"):
        prepared([tmp_path / "v.h5"], tmp_path / "set")
    with h5py.File(tmp_path / "v.h5", "w", libver="latest") as file:
        file.swmr_mode = True
        with pytest.raises(InputError, match=r"v\.h5 is open in a program that writes it; wait until it ends, or run"):
            prepared([tmp_path / "v.h5"], tmp_path / "set")
    with h5py.File(tmp_path / "v.h5", "w") as file:
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_chunk((4,))
        layout.set_filter(32015, h5py.h5z.FLAG_OPTIONAL, (3,))  # zstd
        space = h5py.h5s.create_simple((4,))
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F32LE, space, layout).write_direct_chunk((0,), b"zstd")
    with pytest.raises(InputError, match="it needs a plugin for the HDF5 filter 32015 in a folder of HDF5_PLUGIN_PATH"):
        prepared([tmp_path / "v.h5"], tmp_path / "set", x=("x",), ahead=1)


def test_netcdf_3_and_large_chunks_in_place_are_refused(tmp_path):
    (tmp_path / "old.nc").write_bytes(b"CDF\x01" + bytes(60))
    with pytest.raises(InputError, match="is NetCDF 3, not NetCDF 4; convert it with nccopy -k nc4"):
        prepared([tmp_path / "old.nc"], tmp_path / "set")
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((64, 128, 128), "f4"), chunks=(64, 128, 128), compression="gzip")
        file["y"] = np.arange(64) % 2
    with pytest.raises(InputError, match="chunks of 64 samples, all of which must be decoded to read one"):
        prepared([tmp_path / "v.h5"], tmp_path / "set", in_place=True)
