"""Local regions: modules that treat samples apart, which run on this rank's rows as plain tensors.

The first call of a module with tensors of these shapes is observed while it runs on batches (`observing.py`). If all
its operations treated samples apart, later calls run torch's own operations on plain tensors, forward and backward:

    batch -> enter -> | this rank's rows -> module -> rows of its outputs | -> leave -> batch
    parameters -> share ->                                                  gradients: summands of this rank

Functions that draw or need statistics of the whole batch (`STEPS_OUT`, such as dropout and batch norm) leave the region
and enter it again. A region is only used while everything that it was observed with is the same (`states.py`), and
calls 16, 32, 64, ... are observed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.jit import _builtins
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from mpitrain.comm.memory.device import CPU, generator_state, set_generator_state
from mpitrain.errors import InputError
from mpitrain.run.boundaries import BOUNDARIES, Place, Replicate, SharedUse, enter, leave
from mpitrain.run.observing import Observation, Witness
from mpitrain.run.pending import BUCKET
from mpitrain.run.session import ScriptRun
from mpitrain.run.states import call_key, module_state
from mpitrain.run.tensors import BatchTensor, WholeTensor

STEPS_OUT = (
    "dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "rrelu", "batch_norm",
    "scaled_dot_product_attention",
)  # fmt: skip
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)
_FIRST_RECHECK = 16  # calls of a region until it is observed again
_LEAST_OPERATIONS = 2  # of a region; a single operation is faster alone
_BEFORE_OTHERS = 2**63 - 1  # sequence number of a function that backward calls before all others that are ready
_MOST_KEYS = 4096  # calls of one module with different arguments that are remembered


class Region:
    """Module with arguments of one kind, which was observed to treat samples apart.

    Attributes:
        calls: Number of calls.

    Args:
        module: The module.
        inputs: Place of each leaf of its arguments that is a batch, by number; other leaves are passed on.
        outputs: Place of each leaf of what it returns.
        steps: Steps out of the region, in order: places of the arguments and of the result of each, or None.
    """

    def __init__(
        self, module: nn.Module, inputs: dict[int, Place], outputs: list[Place], steps: list[Any] | None = None
    ) -> None:
        self.inputs, self.outputs, self.steps = inputs, outputs, steps or []
        self.calls = 0
        self._parameters: list[torch.Tensor] = []
        self._slots: list[tuple[dict[str, Any], str, int]] = []
        self._recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)]
        numbers: dict[torch.Tensor, int] = {}
        for each in module.modules():
            for name, p in each._parameters.items():
                if p is not None and p.requires_grad:
                    number = numbers.setdefault(p, len(numbers))
                    self._slots.append((each._parameters, name, number))
        self._parameters = list(numbers)
        self._starts: list[int] = []  # of buckets; filled in later, because reading a size would be observed

    def run(self, regions: Regions, call: Callable[..., Any], module: nn.Module, leaves: list[Any], spec: Any) -> Any:
        """Return what the module returns for these leaves of its arguments, as batches.

        Args:
            regions: Regions of the script.
            call: `nn.Module.__call__` as it was.
            module: The module.
            leaves: Leaves of its arguments.
            spec: Structure of the arguments.
        """
        session, leaves = regions.session, list(leaves)
        entering = enter(session, list(self.inputs.values()), [leaves[i] for i in self.inputs])
        for i, x in zip(self.inputs, entering, strict=True):
            leaves[i] = x
        others = [i for i, x in enumerate(leaves) if i not in self.inputs and _needs_gradient(x)]
        shared = [*self._parameters, *(leaves[i] for i in others)]
        shares = self._share(session, shared) if shared and torch.is_grad_enabled() else shared
        for i, x in zip(others, shares[len(self._parameters) :], strict=True):
            leaves[i] = x
        args, kwargs = tree_unflatten(leaves, spec)
        with self._with(shares), regions.inside(self):
            out = call(module, *args, **kwargs)
        results, of_out = tree_flatten(out)
        if len(results) != len(self.outputs) or any(
            not isinstance(y, torch.Tensor) or y.dim() <= at or y.shape[at] != rows.length
            for y, (at, rows) in zip(results, self.outputs, strict=False)
        ):
            raise _other_path(module)
        if not self.calls and any(map(_escapes, results)):
            raise _EscapeError
        self.calls += 1
        return tree_unflatten(list(leave(session, self.outputs, results)), of_out)

    def _share(self, session: ScriptRun, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors for use on rows, such that backward has the summands of each bucket as soon as it can."""
        shares = list[torch.Tensor]()
        self._starts = self._starts or _starts_of_buckets(self._parameters)
        for start, end in pairwise([*self._starts, len(tensors)]):
            shares += SharedUse.apply(session, *tensors[start:end])
            shares[-1].grad_fn._set_sequence_nr(_BEFORE_OTHERS)  # type: ignore[union-attr]
        return shares

    @contextmanager
    def _with(self, shares: Any) -> Iterator[None]:
        """Let the module use these tensors as its parameters."""
        flat_weights = [(m, m.__dict__["_flat_weights"]) for m in self._recurrent]
        for parameters, name, number in self._slots:
            parameters[name] = shares[number]
        for m, _ in flat_weights:
            m.__dict__["_flat_weights"] = [getattr(m, name) for name in m._flat_weights_names]
        try:
            yield
        finally:
            for parameters, name, number in self._slots:
                parameters[name] = self._parameters[number]
            for m, weights in flat_weights:
                m.__dict__["_flat_weights"] = weights


class _EscapeError(Exception):
    """A tensor of a region depends on a parameter that did not enter it."""


class Regions:
    """Local regions of a script.

    Args:
        session: Run of the script.
    """

    def __init__(self, session: ScriptRun) -> None:
        self.session = session
        self.region: Region | None = None  # in which the script is
        device = torch.accelerator.current_accelerator()
        self._kinds = ["cpu", *([] if device is None else [device.type])]  # of devices, for autocast
        self._is_paused = self._is_stepping = False
        self._trace: list[Any] | None = None  # steps out of the module that is observed
        self._known: weakref.WeakKeyDictionary[nn.Module, dict[Any, Region | None]] = weakref.WeakKeyDictionary()
        self._refused: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        """Replace functions of torch that step out of regions or call modules again in backward; compile nothing."""
        _use_kernels_with_rules()
        for name in STEPS_OUT:
            setattr(F, name, self._stepping_out(name, getattr(F, name)))
        checkpoint = torch.utils.checkpoint.checkpoint

        def with_pause(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self.session.crossings += 1
            return checkpoint(self._paused(function), *args, **kwargs)

        torch.utils.checkpoint.checkpoint = with_pause
        torch.compiler.set_stance("force_eager")  # a compiled function would not see that a batch is divided

    def forget(self) -> None:
        """Observe all modules again."""
        self._known.clear()
        self._refused.clear()

    def _paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that uses no regions, so that it computes the same again in backward."""

        def paused(*args: Any, **kwargs: Any) -> Any:
            before, self._is_paused = self._is_paused, True
            try:
                return function(*args, **kwargs)
            finally:
                self._is_paused = before

        return paused

    @contextmanager
    def inside(self, region: Region) -> Iterator[None]:
        """Run the body of the `with` statement in a region."""
        self.region, self._step = region, 0
        try:
            yield
            if self._step != len(region.steps):
                raise InputError("mpitrain.run: a module took another path than when it was observed", agreed=True)
        finally:
            self.region = None

    # -- calls of modules

    def call(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a module: in a region if it was observed to treat samples apart, else on batches.

        Args:
            call: `nn.Module.__call__` as it was.
            module: The module.
            args: Positional arguments.
            kwargs: Keyword arguments.
        """
        leaves, spec = tree_flatten((args, kwargs))
        key = None
        is_eligible = not self._is_paused and not isinstance(module, torch.jit.ScriptModule)
        if is_eligible and (modes := self._modes(module)) not in self._refused.get(module, ()):
            key = call_key(leaves, spec)
        if key is None or (state := module_state(module)) is None:
            return call(module, *args, **kwargs)
        key = (*key, modes, state)
        if type(module) in _RECURRENT and (region := _recurrent(module, leaves)) is not None:
            region.calls = 1
            return region.run(self, call, module, leaves, spec)
        known = self._known.setdefault(module, {})
        region = known.get(key)
        is_due = region is not None and region.calls >= _FIRST_RECHECK and region.calls & (region.calls - 1) == 0
        if key not in known or is_due:
            if len(known) > _MOST_KEYS:
                known.clear()
            out, known[key] = self._observe(call, module, args, kwargs, leaves)
            if known[key] is None:
                self._refused.setdefault(module, set()).add(modes)
            elif region is not None:
                known[key].calls = region.calls + 1  # type: ignore[union-attr]
            return out
        if region is None or self._trace is not None:
            return call(module, *args, **kwargs)
        if region.calls:
            return region.run(self, call, module, leaves, spec)
        return self._run_first(region, call, module, args, kwargs, leaves, spec, known, key)

    def _modes(self, module: nn.Module) -> Any:
        autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in self._kinds]
        return module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast

    def _run_first(
        self, region: Region, call: Any, module: nn.Module, args: Any, kwargs: Any, leaves: Any, spec: Any, known: Any,
        key: Any,
    ) -> Any:  # fmt: skip
        """Run a region for the first time, or on batches if a tensor that requires grad did not enter as it should."""
        devices = {CPU, *(x.device for x in leaves if isinstance(x, torch.Tensor))}
        generators = [(device, generator_state(device)) for device in devices]
        buffers = [(b, b.clone()) for b in module.buffers()]
        try:
            return region.run(self, call, module, leaves, spec)
        except _EscapeError:
            known[key] = None
            self._refused.setdefault(module, set()).add(self._modes(module))
        for device, state in generators:
            set_generator_state(device, state)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        return call(module, *args, **kwargs)

    def _observe(
        self, call: Any, module: nn.Module, args: Any, kwargs: Any, leaves: list[Any]
    ) -> tuple[Any, Region | None]:
        """Run a module on batches, and return what it returns and its region. Collective."""
        session, is_outermost = self.session, self._trace is None
        if is_outermost:
            self._trace, session.results = [], []
        assert self._trace is not None
        try:
            witness, start = Witness(session, module, [x for x in leaves if type(x) is BatchTensor]), len(self._trace)
            if is_outermost:
                with Observation(session):
                    out = call(module, *args, **kwargs)
            else:
                out = call(module, *args, **kwargs)
            outputs, _ = tree_flatten(out)
            is_local = witness.is_local(outputs) and witness.operations >= _LEAST_OPERATIONS
            region = None
            if not session.meet(f"a call of {type(module).__name__}", not is_local):
                inputs = {i: _place(x) for i, x in enumerate(leaves) if type(x) is BatchTensor}
                region = Region(module, inputs, [_place(x) for x in outputs], self._trace[start:])
            return out, region
        finally:
            if is_outermost:
                self._trace = session.results = None

    # -- steps out of a region

    def _stepping_out(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that leaves the region, computes on batches and enters the region again where needed."""

        def function(*args: Any, **kwargs: Any) -> Any:
            if self._is_stepping:  # torch calls `original` by this name again in a mode
                return original(*args, **kwargs)
            if self.region is not None:
                return self._step_out(self.region, name, original, args, kwargs)
            if self._trace is None:
                return original(*args, **kwargs)
            session = self.session
            before, self._is_stepping = session.crossings, True
            try:
                out = original(*args, **kwargs)
            finally:
                self._is_stepping = False
            step = None
            if session.crossings != before and type(out) is BatchTensor:
                session.crossings = before
                leaves, _ = tree_flatten((args, kwargs))
                step = {i: _place(x) for i, x in enumerate(leaves) if type(x) is BatchTensor}, _place(out)
            self._trace.append((name, step))
            return out

        function.__name__ = name
        keep_scriptable(function, original)
        return function

    def _step_out(self, region: Region, name: str, original: Any, args: Any, kwargs: Any) -> Any:
        number, self._step = self._step, self._step + 1
        if number >= len(region.steps) or region.steps[number][0] != name:
            raise InputError("mpitrain.run: a module took another path than when it was observed", agreed=True)
        step = region.steps[number][1]
        self._is_stepping = True
        try:
            return original(*args, **kwargs) if step is None else self._on_batches(region, step, original, args, kwargs)
        finally:
            self._is_stepping = False

    def _on_batches(self, region: Region, step: Any, original: Any, args: Any, kwargs: Any) -> Any:
        """Return this rank's rows of what a function returns for the batches of which it got rows."""
        session, (inputs, output) = self.session, step
        leaves, spec = tree_flatten((args, kwargs))
        batches = leave(session, list(inputs.values()), [leaves[i] for i in inputs])
        for i, x in zip(inputs, batches, strict=True):
            leaves[i] = x
        for i, x in enumerate(leaves):
            if i not in inputs and _needs_gradient(x) and torch.is_grad_enabled():
                leaves[i] = Replicate.apply(session, x)
        args, kwargs = tree_unflatten(leaves, spec)
        self.region = None
        try:
            return enter(session, [output], [original(*args, **kwargs)])[0]
        finally:
            self.region = region


def _use_kernels_with_rules() -> None:
    """Compute batches on accelerators by operations that can run on rows: torch's own batch norm, plain attention."""
    norm: Any = torch.batch_norm
    attention = F.scaled_dot_product_attention

    def batch_norm(*args: Any, cudnn_enabled: bool = False, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = norm(*args[:8], **kwargs, cudnn_enabled=False)  # nor MIOpen
        return out

    def attend(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if type(query) is BatchTensor and query.device.type != "cpu":
            with sdpa_kernel(SDPBackend.MATH):
                return attention(query, *args, **kwargs)
        return attention(query, *args, **kwargs)

    keep_scriptable(batch_norm, norm)
    keep_scriptable(attend, attention)
    torch.batch_norm, F.scaled_dot_product_attention = batch_norm, attend


def keep_scriptable(function: Any, original: Any) -> None:
    """Let torch.jit.script compile a function of torch as it was, where code calls one that replaces it.

    Args:
        function: Function that replaces the original.
        original: The original.
    """
    if (operation := _builtins._find_builtin(original)) is not None:
        _builtins._register_builtin(function, operation)
    else:
        vars(function).update(__script_if_tracing_wrapper=True, __original_fn=original)


def _starts_of_buckets(parameters: list[torch.Tensor]) -> list[int]:
    """Return the number of the first parameter of each bucket; backward fills the last bucket first."""
    starts, nbytes = list[int](), 0
    for number, p in reversed(list(enumerate(parameters))):
        nbytes += p.nbytes
        if nbytes >= BUCKET:
            starts, nbytes = [number, *starts], 0
    return [0, *(start for start in starts if start)]


def _place(x: Any) -> Place:
    return x.division.at, x.division.rows


def _needs_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _other_path(module: nn.Module) -> InputError:
    name = type(module).__name__
    return InputError(f"mpitrain.run: {name} returned other tensors than when it was observed", agreed=True)


def _recurrent(module: Any, leaves: list[Any]) -> Region | None:
    """Return the region of a recurrent layer of torch, which treats samples apart by its definition."""
    x, *hidden = leaves
    at = 0 if module.batch_first else 1
    if type(x) is not BatchTensor or x.dim() != 3 or x.division.at != at or (module.dropout and module.training):
        return None
    rows = x.division.rows
    of_hidden = (1, rows)
    if any(
        not isinstance(h, torch.Tensor) or h.dim() != 3 or h.shape[1] != rows.total for h in hidden if h is not None
    ):
        return None
    if any(isinstance(h, WholeTensor) and type(h) is not BatchTensor for h in hidden):
        return None
    inputs = {0: (at, rows)} | {i: of_hidden for i, h in enumerate(hidden, 1) if h is not None}
    return Region(module, inputs, [(at, rows), *[of_hidden] * (2 if isinstance(module, nn.LSTM) else 1)])


def _escapes(x: torch.Tensor) -> bool:
    """Return whether the gradient of a tensor flows to a parameter directly, or through a function of the user's."""
    nodes, seen = [x.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        cls = getattr(node, "_forward_cls", None)
        if type(node).__name__ == "AccumulateGrad" or (cls is not None and cls not in BOUNDARIES):
            return True
        if cls is not None and cls.__name__ in ("Enter", "SharedUse"):
            continue
        nodes += [n for n, _ in node.next_functions]
    return False
