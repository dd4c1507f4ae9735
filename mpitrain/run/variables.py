"""Values of a script's variables as JSON values and tensors, from which another process gets them back.

| value | JSON |
|---|---|
| None, bool, int, float, str | itself |
| bytes, complex, numbers that are not finite, dtypes, devices, slices | [kind, text or numbers] |
| everything else | ["#", number of an entry in a table], so that an object with two names stays one object |

Where the other process has an object of the same type at the same place, this object takes the saved content: so a
parameter stays the parameter of its module and of its optimizer. Other objects are made, if their class is the
script's, torch's or a plain container. Functions, classes, modules and open files are those of the other process.
Nothing is imported and nothing is called but `__new__` of such classes.
"""

from __future__ import annotations

import io
import logging
import math
import random
import re
import sys
import threading
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from datetime import date, time, timedelta
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import dataloader

from mpitrain.errors import InputError
from mpitrain.run.parameters import ShardedParameter
from mpitrain.run.tensors import BatchTensor, WholeTensor

LARGE = 1 << 20  # bytes from which a tensor that does not change is compared instead of saved
_PLAIN = {type(None), bool, int, str}
_OPAQUE = (
    ModuleType, type, BuiltinFunctionType, CodeType, logging.Logger, logging.Handler, logging.Formatter, io.IOBase,
    re.Pattern, weakref.ref, date, time, timedelta, type(threading.Lock()), type(threading.RLock()), type(Ellipsis),
    type(NotImplemented), property, staticmethod, classmethod, threading.Thread, type(re.match("", "")),
)  # fmt: skip
_CONSTANT = {  # packages whose objects a script makes before it trains, and does not change
    "PIL", "_io", "argparse", "concurrent", "contextlib", "datasets", "h5py", "importlib", "logging", "matplotlib",
    "mpitrain", "multiprocessing", "netCDF4", "pandas", "pyarrow", "scipy", "sentencepiece", "tensorboard",
    "tensorboardX",
    "threading", "tokenizers", "tqdm", "typing", "wandb", "xarray", "zarr", "abc", "_weakrefset", "decimal", "uuid",
}  # fmt: skip
_LAYERS = (OrderedDict, dict, list, set, deque)  # containers whose derived classes have their content
_IMMUTABLE = (tuple, frozenset)


class LostError(Exception):
    """Value that this process has not made, because the script passes over the place where it is made."""


class VariableEncoder:
    """Encoding of values.

    Args:
        is_script: Function that says whether a file belongs to the script.
        constants: Checksum of each large tensor or array that has not changed since training began, by identity.

    Attributes:
        table: Entries of the objects.
        tensors: Contents of tensors and arrays, by name.
    """

    def __init__(self, is_script: Callable[[str], bool], constants: dict[int, int]) -> None:
        self.table: list[Any] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self._is_script, self._constants = is_script, constants
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # temporary objects, whose identities must not be used again

    def encode(self, x: Any, where: str) -> Any:
        """Return a value as a JSON value.

        Args:
            x: The value.
            where: Name of the variable, for messages.

        Raises:
            InputError: The value has a state that cannot be read.
        """
        kind = type(x)
        if kind in _PLAIN:
            return x
        if kind is float:
            return x if math.isfinite(x) else ["float", repr(x)]
        if (simple := _encode_simple(x)) is not None:
            return simple
        number = self._numbers.get(id(x))
        if number is None:
            number = self._numbers[id(x)] = len(self.table)
            self._alive.append(x)
            self.table.append(None)
            self.table[number] = self._entry(x, where, number)
        return ["#", number]

    def _entry(self, x: Any, where: str, number: int) -> Any:
        if isinstance(x, torch.Tensor):
            return self._tensor(x, where, number)
        if isinstance(x, np.ndarray):
            return self._array(x, where, number)
        if (state := generator_state(x)) is not None:
            return ["generator", class_name(x), self.encode(state, where)]
        if isinstance(x, FunctionType):
            return self._function(x, where)
        if isinstance(x, MethodType):
            return ["method", self.encode(x.__self__, f"{where}.__self__"), x.__func__.__name__]
        if isinstance(x, dataloader._BaseDataLoaderIter) and hasattr(x, "iteration"):
            loader = self.encode(x.iteration.loader, f"{where}.loader")
            return ["iterator", loader, x.iteration.describe(self)]
        if isinstance(x, GeneratorType) or (hasattr(type(x), "__next__") and not hasattr(x, "__dict__")):
            raise _unsavable(where, x, "is in the middle of something")
        root = type(x).__module__.partition(".")[0]
        if isinstance(x, _OPAQUE) or (root in _CONSTANT and class_name(x) != "argparse:Namespace"):
            return ["kept", class_name(x), _reference(x)]
        return self._object(x, where)

    def _object(self, x: Any, where: str) -> Any:
        if not _is_transparent(type(x)):
            raise _unsavable(where, x, "has a state that only its library knows")
        entry: dict[str, Any] = {"class": class_name(x)}
        if isinstance(x, dict):
            entry["dict"] = [
                [self.encode(k, f"{where} (key)"), self.encode(v, f"{where}[{k!r:.30}]")] for k, v in list(x.items())
            ]
        elif isinstance(x, (list, tuple, deque)):
            entry["list"] = [self.encode(v, f"{where}[{i}]") for i, v in enumerate(x)]
        elif isinstance(x, (set, frozenset)):
            entry["list"] = [self.encode(v, where) for v in sorted(x, key=repr)]
        attributes = attributes_of(x)
        if attributes:
            entry["attributes"] = [[n, self.encode(v, f"{where}.{n}")] for n, v in attributes.items()]
        if isinstance(x, deque):
            entry["longest"] = x.maxlen
        if hasattr(x, "default_factory"):
            entry["factory"] = _reference(x.default_factory)
        return ["object", entry]

    def _function(self, x: FunctionType, where: str) -> Any:
        """Return a function, with the variables of enclosing functions if it belongs to the script."""
        cells = []
        if self._is_script(x.__code__.co_filename):
            for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
                try:
                    cells.append(self.encode(cell.cell_contents, f"{where} ({name})"))
                except ValueError:  # not set yet
                    cells.append(["empty"])
        defaults = [self.encode(v, where) for v in x.__defaults__ or ()] if cells or x.__defaults__ else []
        return ["function", _reference(x), _qualname(x), cells, defaults]

    def _tensor(self, x: torch.Tensor, where: str, number: int) -> Any:
        facts: dict[str, Any] = {"grad": x.requires_grad, "leaf": x.is_leaf, "view": x._is_view()}
        facts["class"] = "parameter" if isinstance(x, torch.nn.Parameter) else "tensor"
        if type(x) is BatchTensor:
            facts["rows"] = [x.division.at, list(x.division.rows.counts)]
        if x.is_leaf and x.grad is not None:
            facts["gradient"] = self.encode(x.grad, f"{where}.grad")
        data = (x.whole() if isinstance(x, WholeTensor) else x).detach()
        if data.layout != torch.strided or data.is_quantized:
            raise _unsavable(where, x, f"has the layout {data.layout}")
        if isinstance(x, WholeTensor):
            facts["leaf"] = not x.requires_grad or x.is_leaf
        facts |= {"shape": list(data.shape), "dtype": str(data.dtype).removeprefix("torch."), "strides": _strides(data)}
        if not data.is_cpu:
            facts["device"] = data.device.type
        attributes = dict(vars(x)) if type(x) in (torch.Tensor, torch.nn.Parameter) else {}
        if attributes:
            facts["attributes"] = [[n, self.encode(v, f"{where}.{n}")] for n, v in attributes.items()]
        if (constant := self._constants.get(id(x))) is not None and constant == checksum(x):
            facts["checksum"] = constant
        else:
            self.tensors[f"variable/{number}"] = _flat(data)
        facts["where"] = where
        return ["tensor", facts]

    def _array(self, x: np.ndarray, where: str, number: int) -> Any:
        if x.dtype.hasobject or x.dtype.fields is not None or type(x) is not np.ndarray:
            raise _unsavable(where, x, "is an array of objects")
        facts = {"shape": list(x.shape), "dtype": x.dtype.str, "where": where}
        if (constant := self._constants.get(id(x))) is not None and constant == checksum(x):
            facts["checksum"] = constant
        else:
            self.tensors[f"variable/{number}"] = torch.from_numpy(
                np.ascontiguousarray(x).reshape(-1).view(np.uint8).copy()
            )
        return ["array", facts]


class VariableDecoder:
    """Decoding of values into the objects of this process.

    Args:
        table: Entries of the objects.
        tensors: Function that returns the content of a tensor or an array, by name.
        is_script: Function that says whether a file belongs to the script.
        divide: Function that returns a batch, given its whole content, its dimension and the rows of each rank.
        iterate: Function that returns an iterator over a DataLoader at the position of a saved one.
    """

    def __init__(
        self, table: list[Any], tensors: Callable[[str], torch.Tensor], is_script: Callable[[str], bool],
        divide: Callable[[torch.Tensor, int, list[int]], torch.Tensor],
        iterate: Callable[[Any, dict[str, Any], VariableDecoder], Any],
    ) -> None:  # fmt: skip
        self._table, self._tensors, self._is_script, self._divide = table, tensors, is_script, divide
        self._iterate = iterate
        self._objects: dict[int, Any] = {}
        self._lost: dict[int, str] = {}  # objects that cannot be made, with their kind
        self._taken: dict[int, Any] = {}  # objects of this process that have their content, by identity

    def decode(self, value: Any, live: Any = None) -> Any:
        """Return the value.

        Args:
            value: JSON value that `VariableEncoder.encode` returned.
            live: Value that this process has in its place, or None.

        Raises:
            LostError: It is a value of this process, which has none.
            InputError: A large tensor that was not saved has another content.
        """
        if not isinstance(value, list):
            return value
        if value[0] != "#":
            return _decode_simple(value, live)
        number = value[1]
        if number in self._lost:
            raise LostError(self._lost[number])
        if number not in self._objects:
            entry = self._table[number]
            if id(live) in self._taken:
                live = None
            try:
                self._objects[number] = getattr(self, f"_decode_{entry[0]}")(number, live, *entry[1:])
            except LostError as error:
                self._objects.pop(number, None)
                self._lost[number] = str(error)
                raise
        return self._objects[number]

    def _take(self, number: int, x: Any) -> Any:
        self._objects[number] = self._taken[id(x)] = x
        return x

    def _decode_kept(self, number: int, live: Any, name: str, reference: Any) -> Any:
        other = _referred(reference)
        if other is not None:
            return other
        if live is None or class_name(live) != name:
            raise LostError(f"a {name.replace(':', '.')}")
        return live

    def _decode_method(self, number: int, live: Any, owner: Any, name: str) -> Any:
        of_live = live.__self__ if isinstance(live, MethodType) else None
        x = self.decode(owner, of_live)
        return live if of_live is x and live.__name__ == name else getattr(x, name)

    def _decode_function(self, number: int, live: Any, reference: Any, name: str, cells: Any, defaults: Any) -> Any:
        if not isinstance(live, FunctionType) or _qualname(live) != name:
            live = _referred(reference)
        if not isinstance(live, FunctionType):
            raise LostError(f"the function {name}")
        self._take(number, live)
        for cell, value in zip(live.__closure__ or (), cells, strict=False):
            if value == ["empty"]:
                continue
            try:
                content = cell.cell_contents
            except ValueError:
                content = None
            cell.cell_contents = self.decode(value, content)
        if defaults and live.__defaults__ is not None and len(live.__defaults__) == len(defaults):
            live.__defaults__ = tuple(map(self.decode, defaults, live.__defaults__))
        return live

    def _decode_generator(self, number: int, live: Any, name: str, state: Any) -> Any:
        values = self.decode(state)
        if live is None or class_name(live) != name:
            makers: dict[str, Callable[[], Any]] = {
                "torch._C:Generator": torch.Generator, "random:Random": random.Random,
                "numpy.random.mtrand:RandomState": np.random.RandomState,
            }  # fmt: skip
            if name not in makers:
                raise LostError(f"a {name.replace(':', '.')}")
            live = makers[name]()
        set_generator_state(live, values)
        return self._take(number, live)

    def _decode_iterator(self, number: int, live: Any, loader: Any, entry: dict[str, Any]) -> Any:
        is_alike = isinstance(live, dataloader._BaseDataLoaderIter)
        of_live = live.iteration.loader if is_alike else None
        x = self._iterate(self.decode(loader, of_live), entry, self)
        if type(live) is type(x):
            vars(live).clear()
            vars(live).update(vars(x))
            x = live
        return self._take(number, x)

    def _decode_object(self, number: int, live: Any, entry: dict[str, Any]) -> Any:
        name = entry["class"]
        if live is not None and class_name(live) != name:
            live = None
        cls: Any = type(live) if live is not None else self._class(name)
        content: Any = entry.get("list", entry.get("dict"))
        attributes = entry.get("attributes")
        if issubclass(cls, _IMMUTABLE):
            old = list(live) if isinstance(live, tuple) and len(live) == len(content) else [None] * len(content)
            items = [self.decode(v, o) for v, o in zip(content, old, strict=True)]
            same = isinstance(live, tuple) and len(live) == len(items)
            if same and all(a is b for a, b in zip(items, live, strict=True)):
                return live
            return cls(*items) if hasattr(cls, "_fields") else cls(items)
        if live is None:
            live = deque(maxlen=entry["longest"]) if cls is deque else cls.__new__(cls)
            if "factory" in entry:
                live.default_factory = _referred(entry["factory"])
        self._take(number, live)
        if "dict" in entry:
            self._fill_dict(live, content)
        elif content is not None:
            old = list(live) if isinstance(live, (list, deque)) else []
            items = [self.decode(v, old[i] if i < len(old) else None) for i, v in enumerate(content)]
            live.clear()
            live.update(items) if isinstance(live, set) else live.extend(items)
        if attributes is not None:
            before = attributes_of(live)
            for each, value in attributes:
                new = self.decode(value, before.get(each))
                if each not in before or before[each] is not new:
                    object.__setattr__(live, each, new)
            for each in before.keys() - {each for each, _ in attributes}:
                object.__delattr__(live, each)
        return live

    def _fill_dict(self, live: Any, content: list[Any]) -> None:
        old = dict(live.items())
        positions = list(old)
        items = []
        for i, (key, value) in enumerate(content):
            k = self.decode(key, positions[i] if i < len(positions) else None)
            items.append((k, self.decode(value, old.get(k))))
        if list(old) != [k for k, _ in items] or any(old[k] is not v for k, v in items):
            base: Any = OrderedDict if isinstance(live, OrderedDict) else dict
            base.clear(live)
            for k, v in items:
                base.__setitem__(live, k, v)

    def _class(self, name: str) -> Any:
        module, _, qualname = name.rpartition(":")
        cls = _referred([module, qualname])
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        root = module.partition(".")[0]
        if not isinstance(cls, type) or not (
            root in ("builtins", "collections", "torch", "argparse", "types") or self._is_script(file)
        ):
            raise LostError(f"a {name.replace(':', '.')}")
        return cls

    def _decode_tensor(self, number: int, live: Any, facts: dict[str, Any]) -> Any:
        shape, dtype = facts["shape"], getattr(torch, facts["dtype"])
        kind = torch.nn.Parameter if facts["class"] == "parameter" else torch.Tensor
        fits = type(live) is kind or (type(live) is ShardedParameter and kind is torch.nn.Parameter)
        fits = fits and list(live.shape) == shape and live.dtype == dtype and live.is_leaf
        fits = fits and live.device.type == facts.get("device", "cpu")
        fits = fits and facts["leaf"] and "rows" not in facts and (facts["view"] or not live._is_view())
        if "checksum" in facts:
            if not fits or checksum(live) != facts["checksum"]:
                raise _changed(facts)
            x = live
        else:
            data = self._tensors(f"variable/{number}").view(shape)
            if fits and 0 not in live.stride():
                live.detach().copy_(data)
                x = live
            else:
                x = self._make_tensor(data, kind, facts)
        self._take(number, x)
        if facts["leaf"] and "rows" not in facts:
            if x.requires_grad != facts["grad"]:
                x.requires_grad_(facts["grad"])
            gradient = facts.get("gradient")
            x.grad = None if gradient is None else self.decode(gradient, x.grad)
        for name, value in facts.get("attributes", ()):
            setattr(x, name, self.decode(value, vars(x).get(name)))
        return x

    def _make_tensor(self, data: torch.Tensor, kind: Any, facts: dict[str, Any]) -> torch.Tensor:
        x = data.to(facts.get("device", "cpu"), copy=True)
        if facts["strides"] is not None:
            x = torch.empty_strided(x.shape, facts["strides"], dtype=x.dtype, device=x.device).copy_(x)
        if "rows" in facts:
            x = self._divide(x, *facts["rows"])
        if kind is torch.nn.Parameter:
            return torch.nn.Parameter(x, facts["grad"])
        if facts["grad"] and not facts["leaf"]:
            x = _Earlier.apply(torch.empty(0, requires_grad=True), x)
        return x

    def _decode_array(self, number: int, live: Any, facts: dict[str, Any]) -> Any:
        shape, dtype = facts["shape"], np.dtype(facts["dtype"])
        fits = type(live) is np.ndarray and list(live.shape) == shape and live.dtype == dtype
        if "checksum" in facts:
            if not fits or checksum(live) != facts["checksum"]:
                raise _changed(facts)
            return self._take(number, live)
        data = self._tensors(f"variable/{number}").numpy().view(dtype).reshape(shape)
        if fits and live.flags.writeable and 0 not in live.strides:
            live[...] = data
            return self._take(number, live)
        return self._take(number, data.copy())


class _Earlier(torch.autograd.Function):
    """Tensor computed before the checkpoint, whose way to the parameters was not saved."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise InputError(
            "the script differentiates a loss that it computed before the checkpoint; run it without --resume",
            agreed=True,
        )


# -- single values


def class_name(x: Any) -> str:
    """Return the module and the name of an object's class, as "module:name"."""
    return f"{type(x).__module__}:{type(x).__qualname__}"


def attributes_of(x: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots included."""
    values = dict(vars(x)) if hasattr(x, "__dict__") and not isinstance(x, type) else {}
    for cls in type(x).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(x, name):
                values[name] = getattr(x, name)
    return values


def checksum(x: Any) -> int:
    """Return a CRC-32 of the content of a tensor or an array."""
    if isinstance(x, torch.Tensor):
        flat = _flat(x.detach())
        return zlib.crc32(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data if x.size else b"")


def large_tensors(encoder: VariableEncoder) -> Iterator[Any]:
    """Yield the large tensors and arrays that an encoder has met and that no gradient changes."""
    for x in encoder._alive:
        if type(x) in (torch.Tensor, torch.nn.Parameter) and x.numel() * x.element_size() >= LARGE:
            if not x.requires_grad:
                yield x
        elif type(x) is np.ndarray and x.nbytes >= LARGE:
            yield x


def generator_state(x: Any) -> Any:
    """Return the state of a generator of random numbers, or None if `x` is none."""
    if isinstance(x, torch.Generator):
        return [x.initial_seed(), x.get_state()]
    if isinstance(x, np.random.Generator):
        return x.bit_generator.state
    if isinstance(x, np.random.RandomState):
        return list(x.get_state())
    return x.getstate() if type(x) is random.Random else None


def set_generator_state(x: Any, state: Any) -> None:
    """Give a generator its state back.

    Args:
        x: The generator.
        state: Value that `generator_state` returned.
    """
    if isinstance(x, torch.Generator):
        x.set_state(state[1])
    elif isinstance(x, np.random.Generator):
        x.bit_generator.state = state
    elif isinstance(x, np.random.RandomState):
        x.set_state(tuple(state))
    else:
        x.setstate(state)


def _encode_simple(x: Any) -> Any:
    """Return a value without identity as a list, or None if it has one."""
    if isinstance(x, complex) and type(x) is complex:
        return ["complex", repr(x.real), repr(x.imag)]
    if type(x) is bytes:
        return ["bytes", x.hex()]
    if isinstance(x, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return ["torch", type(x).__name__, str(x).removeprefix("torch.")]
    if isinstance(x, np.generic) and not isinstance(x, np.object_):
        return ["numpy", x.dtype.str, x.tobytes().hex()]
    if isinstance(x, np.dtype) and not x.hasobject and x.fields is None:
        return ["numpy dtype", x.str]
    if type(x) in (slice, range):
        parts = [x.start, x.stop, x.step]
        return [type(x).__name__, *parts] if all(p is None or type(p) is int for p in parts) else None
    return ["path", str(x)] if isinstance(x, PurePath) else None


def _decode_simple(value: list[Any], live: Any) -> Any:
    kind, *rest = value
    if kind == "float":
        return float(rest[0])
    if kind == "complex":
        return complex(float(rest[0]), float(rest[1]))
    if kind == "bytes":
        return bytes.fromhex(rest[0])
    if kind == "torch":
        return torch.device(rest[1]) if rest[0] == "device" else getattr(torch, rest[1])
    if kind == "numpy":
        return np.frombuffer(bytes.fromhex(rest[1]), np.dtype(rest[0]))[0]
    if kind == "numpy dtype":
        return np.dtype(rest[0])
    if kind == "path":
        return type(live)(rest[0]) if isinstance(live, PurePath) else Path(rest[0])
    return slice(*rest) if kind == "slice" else range(*rest)


def _reference(x: Any) -> Any:
    """Return the module and the name under which a function, class or module can be looked up, or None."""
    if isinstance(x, ModuleType):
        return [x.__name__, ""]
    module, name = getattr(x, "__module__", None), getattr(x, "__qualname__", None)
    is_named = (
        isinstance(module, str) and isinstance(name, str) and isinstance(x, (type, FunctionType, BuiltinFunctionType))
    )
    return [module, name] if is_named and _referred([module, name]) is x else None


def _qualname(x: FunctionType) -> str:
    return getattr(x.__code__, "co_qualname", x.__code__.co_name)  # Python 3.10 has the name only


def _referred(reference: Any) -> Any:
    """Return the function, class or module with this name if it is loaded, else None."""
    if reference is None:
        return None
    x: Any = sys.modules.get(reference[0])
    for name in filter(None, reference[1].split(".")):
        x = getattr(x, name, None)
    return x


def _is_transparent(cls: type) -> bool:
    """Return whether the objects of a class are known from their attributes and, for a container, their content."""
    known = {object, SimpleNamespace, *_LAYERS, *_IMMUTABLE}
    native = next(c for c in cls.__mro__ if not c.__flags__ & (1 << 9))  # the first one that is not made by `class`
    if native not in known and not (issubclass(cls, _LAYERS + _IMMUTABLE)):
        return False
    return (
        native is not object
        or cls is object
        or "__dict__" in dir(cls)
        or any("__slots__" in vars(c) for c in cls.__mro__)
    )


def _strides(x: torch.Tensor) -> list[int] | None:
    """Return the strides of a dense tensor that is not in row-major order, else None."""
    is_dense = torch.empty_like(x).stride() == x.stride()
    return list(x.stride()) if is_dense and not x.is_contiguous() else None


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).cpu()


def _changed(facts: dict[str, Any]) -> InputError:
    return InputError(
        f"--resume: {facts['where']} has other values than when the checkpoint was saved; use the same data",
        agreed=True,
    )


def _unsavable(where: str, x: Any, why: str) -> InputError:
    name = class_name(x).replace(":", ".").removeprefix("builtins.")
    return InputError(
        f"--resume cannot save the variable {where}, which {why} ({name}); run the script without --resume", agreed=True
    )
