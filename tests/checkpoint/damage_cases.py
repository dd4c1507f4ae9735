"""Script that the campaign runs under mpirun: it damages checkpoints and restores them, as the main job would.

    damage_cases.py damage FOLDER SEED CASES     files of checkpoints truncated, flipped, removed, swapped, ...
    damage_cases.py full FOLDER                  FOLDER is a small file system that fills up

Ends with exit code 0 and a line with the number of cases, or with the first broken promise.
"""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

from checkpoint_states import empty, in_boxes, in_shares, in_slices, same, small_tensors

import mpitrain
from mpitrain.checkpoint import Store
from mpitrain.checkpoint.contents import damaged_places
from mpitrain.errors import CheckpointError, InputError
from mpitrain.storage.disk import begin_folder

LAYOUTS = (in_shares, in_slices, in_boxes)


def state(step):
    return small_tensors(seed=step) | small_tensors("optimizer/exp_avg/", seed=step + 100)


def damage(kind, file, other, random):
    """Damage a file; return False if nothing changed."""
    before = file.read_bytes()
    data = bytearray(before)
    at = random.randrange(len(data))
    if kind == "cut":
        del data[at:]
    elif kind == "flip":
        data[at] ^= 1 << random.randrange(8)
    elif kind == "zeros":
        data[at : at + 512] = bytes(len(data[at : at + 512]))
    elif kind == "longer":
        data += b"more"
    elif kind == "remove":
        file.unlink()
        return True
    elif kind == "swap":
        data = bytearray(other.read_bytes())
    elif kind == "empty":
        data.clear()
    file.write_bytes(data)
    return bytes(data) != before


KINDS = ("cut", "flip", "flip", "flip", "zeros", "longer", "remove", "swap", "empty")


def damaged(world, folder, seed, cases):
    for files in ("rank", "node"):
        store = Store(folder / files, world, 9, files=files)
        store.prepare(set_aside=False)
        for step in (1, 2, 3):
            write = LAYOUTS[step % 3]
            store.save(step, write(state(step), world.rank, world.size), {"position": step})
        store.finish()
    outcomes = set()
    for number in range(cases):
        chance = random.Random(seed * 100_003 + number)  # the same on all ranks
        files = chance.choice(["rank", "node"])
        work = folder / "work"
        names = world.on_root(lambda files=files: sorted(p.name for p in (folder / files / "step-00000003").iterdir()))
        name, kind = names[number % len(names)], KINDS[number // len(names) % len(KINDS)]

        def spoil(files=files, work=work, name=name, kind=kind, chance=chance):
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(folder / files, work)
            begin_folder(work / "step-00000007.tmp-0123abcd")
            shutil.copy(work / "step-00000003" / name, work / "step-00000007.tmp-0123abcd")
            place = work / "step-00000003"
            return damage(kind, place / name, work / "step-00000002" / name, chance)

        changed = world.on_root(spoil)
        store = Store(work, world, 9, files=files)
        store.prepare(set_aside=False)
        parts = LAYOUTS[number % 3](state(1), world.rank, world.size)
        loaded, reasons = None, []
        for path in store.newest_first():
            filled = empty(parts)
            try:
                loaded = store.load(path, lambda manifest, filled=filled: filled)
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            break
        case = f"case {number}: {kind} {name} of {files} files: {reasons}"
        expected = LAYOUTS[number % 3](state(loaded.step), world.rank, world.size)
        assert same(filled, expected) and loaded.values == {"position": loaded.step}, f"WRONG LOAD, {case}"
        if loaded.step == 3:  # what was damaged is not restored from
            assert not reasons, case
            messages = world.on_root(lambda work=work: list(damaged_places(work / "step-00000003")))
            assert bool(messages) == changed and all(name in text for text in messages), f"{case}: {messages}"
        else:
            assert loaded.step == 2 and changed and len(reasons) == 1 and name in reasons[0], case
        outcomes.add((name, kind, loaded.step))
        assert world.on_root(lambda work=work: not list(work.glob("*.tmp-*"))), f"leftovers, {case}"
    if world.rank == 0:
        print(f"{cases} cases, {len(outcomes)} different")


def full(world, folder):
    parts = in_slices(state(1), world.rank, world.size)
    ballast, root = folder / "ballast", folder / "c"
    store = Store(root, world, 9)
    store.prepare(set_aside=False)
    store.save(1, parts, {"position": 1})
    page, failed, cases = 4096, 0, 0
    free = 0
    while True:
        world.on_root(lambda free=free: fill(ballast, free * page))
        try:
            store.save(2, parts, {"position": 2}, background=bool(free % 2))
            store.finish()
            done = True
        except (InputError, CheckpointError) as error:
            assert "the disk is full" in str(error) and "step-00000002" in str(error), error
            done, failed = False, failed + 1
        cases += 1
        world.on_root(lambda: ballast.unlink(missing_ok=True))
        listed = [p.name for p in store.newest_first()]
        assert listed == ["step-00000002", "step-00000001"][0 if done else 1 :], listed
        assert world.on_root(lambda: not list(root.glob("*.tmp-*"))), f"leftovers with {free} pages"
        filled = empty(parts)
        store.load(store.newest_first()[-1], lambda manifest, filled=filled: filled)
        assert same(filled, parts)
        if done:
            break
        free += 1
    assert failed > 5, failed
    if world.rank == 0:
        print(f"{cases} cases, {failed} saves failed")


def fill(ballast, free):
    """Leave `free` bytes on the file system."""
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    size = ballast.stat().st_size
    with open(ballast, "r+b") as file:
        file.truncate(max(0, size - free))


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    comm = mpitrain.init(timeout=60)
    if what == "damage":
        damaged(comm, where, int(sys.argv[3]), int(sys.argv[4]))
    else:
        full(comm, where)
