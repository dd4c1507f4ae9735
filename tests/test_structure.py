"""Structure of the code: one-way imports between rooms, short files, and one meaning per name."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support import ROOT

LINES, OF_A_FUNCTION = 600, 60
PACKAGE = ROOT / "mpitrain"
KINDS = {"cuda", "xpu", "hip", "mps", "npu", "hpu", "mtia", "privateuse1"}  # of accelerators, as PyTorch names them
KNOWS_KINDS = {"mpitrain/comm/memory/device.py"}  # everybody else says device, stream, event, pinned
TYPES_IN_CIRCLES = ("mpitrain.trainer.",)  # rooms whose imports for type annotations are not looked at yet


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    paths = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def test_import_contracts_between_rooms_hold():
    """Check the contracts in setup.cfg, [importlinter:...]."""
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_the_picture_of_the_rooms_is_current():
    """Compare the picture with the one that docs/rooms.py draws from the contracts."""
    drawn = runpy.run_path(str(ROOT / "docs/rooms.py"))["drawn"]()
    assert (ROOT / "docs/rooms.svg").read_text(encoding="utf-8") == drawn, "run python docs/rooms.py"


def test_there_are_no_circular_imports():
    """Check imports at module level, those for type annotations included. Imports inside functions do not count."""
    imports = {name: set(_imports(path, tree)) for path, tree in trees() for name in [_module(path)]}
    remaining = dict(imports)
    while free := [name for name, imported in remaining.items() if not (imported & remaining.keys()) - {name}]:
        for name in free:
            del remaining[name]
    assert not remaining, f"circles among {sorted(remaining)}"


def test_every_file_and_function_is_short():
    long = [f"{p.relative_to(ROOT)}: {n} lines" for p, _ in trees() if (n := _lines(p)) > LINES]
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > OF_A_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


def test_class_names_are_unique():
    names = Counter(
        node.name for _, tree in trees() for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_names_of_test_files_are_unique():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))  # pytest imports them by these
    assert [name for name, count in names.items() if count > 1] == []


def test_only_one_file_names_kinds_of_devices():
    places = []
    for path, tree in trees():
        if path.relative_to(ROOT).as_posix() not in KNOWS_KINDS:
            places += [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in _kinds_in(tree)]
    assert not places, "ask mpitrain.comm.memory.device instead:\n" + "\n".join(places)


def test_names_of_device_kinds_are_detected():
    asks = "x.is_cuda", "torch.cuda.synchronize()", "x.device.type == 'xpu'", "x.to('cuda:0')", "import torch.cuda"
    for code in (*asks, "from torch import xpu", "from torch.cuda import Stream", "x.cuda()"):
        assert len(list(_kinds_in(ast.parse(code)))) == 1, code
    assert not list(_kinds_in(ast.parse("'the kind, such as cuda'; x.device.type == 'cpu'; self.cudart")))


def _kinds_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield lines and expressions that name a kind of accelerator: attributes, imports, and strings."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr.removeprefix("is_")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value.partition(":")[0]]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")[1:]]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        if KINDS & set(names):
            yield node.lineno, ast.unparse(node)


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield the modules that a file imports at its top, those for type annotations included."""
    for node in _outside_functions(tree.body, types=not _module(path).startswith(TYPES_IN_CIRCLES)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def _outside_functions(body: list[ast.stmt], types: bool) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and (types or "TYPE_CHECKING" not in ast.dump(node.test)):
            yield from _outside_functions([*node.body, *node.orelse], types)
        elif isinstance(node, ast.Try):
            yield from _outside_functions(node.body, types)


WITHOUT_MPI = """
    comm comm.algorithms.* comm.memory.device comm.programs.* comm.selection config.* layers.* layout.* models.*
    pipe.partition pipe.schedule pipe.simulate planner.* shard.flat shard.placement tensor.*
"""


def test_groups_of_ranks_are_requested_by_role():
    """Check that our code does not use mesh.data, mesh.pipeline and mesh.tensor, which are for users."""
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in {"data", "pipeline", "tensor"}:
                base = node.value
                name = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
                assert name != "mesh", f"{path.relative_to(ROOT)}:{node.lineno} asks the mesh for an axis by its name"


def test_the_planner_loads_no_mpi():
    """Import the planner and its dependencies without mpi4py; `.*` stands for all files of a room."""
    code = f"""
        import sys
        sys.modules["mpi4py"] = None  # to import it fails
        from importlib import import_module
        from pkgutil import walk_packages
        for name in {WITHOUT_MPI.split()}:
            module = import_module("mpitrain." + name.removesuffix(".*"))
            if name.endswith(".*"):
                for found in walk_packages(module.__path__, module.__name__ + "."):
                    if not found.name.endswith("__main__"):
                        import_module(found.name)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_files_named_in_the_documentation_exist():
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "README.md"):
        for name in re.findall(r"`([\w/]+\.(?:py|sh|md|cfg))`", page.read_text(encoding="utf-8")):
            exists = (ROOT / name).exists() or (PACKAGE / name).exists() or any(PACKAGE.rglob(name))
            assert exists, f"{page.name} names {name}"
