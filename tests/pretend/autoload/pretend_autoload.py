"""Called at the end of `import torch` where this folder is on PYTHONPATH: the process has the simulated accelerator."""

import importlib.util
import sys
from pathlib import Path


def show() -> None:
    folder = Path(__file__).resolve().parents[1]
    if "pretend" not in sys.modules:  # without putting all of `tests` on the path
        spec = importlib.util.spec_from_file_location("pretend", folder / "__init__.py")
        package = importlib.util.module_from_spec(spec)
        sys.modules["pretend"] = package
        spec.loader.exec_module(package)
    sys.modules["pretend"].available(True)
