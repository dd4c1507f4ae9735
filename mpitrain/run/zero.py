"""States of optimizers and gradients sharded over the ranks (`--parallel.zero`).

Each parameter has an owner. In a step of an optimizer, a rank sees the gradients of the parameters that it owns, so it
has states for these alone; then the ranks exchange the parameters.

    rank   states        updates       receives
    0      p0 p1         p0 p1         p2 p3
    1      p2 p3         p2 p3         p0 p1

With `--parallel.zero 2`, the gradient of a parameter is summed on its owner alone: each 8 MiB of them as soon as
backward has them, and the rest when the script first reads one.

With `--parallel.zero 3`, the owner of a parameter alone has its content between uses, from the moment that an optimizer
gets it. Parameters of fewer than 4,096 elements stay whole, and so do those to which somebody has weak references, such
as recurrent layers.

Where somebody reads all states, as `state_dict` and a checkpoint do, the ranks exchange them and drop them afterwards.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from mpitrain.errors import InputError
from mpitrain.run.gradients import stored_sum
from mpitrain.run.parameters import ShardedParameter, shard
from mpitrain.run.session import ScriptRun
from mpitrain.run.states import forget_numbers
from mpitrain.run.tensors import PendingSum

_KINDS = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
LEAST = 1 << 12  # elements of a parameter that is sharded
_EXCHANGE = 32 << 20  # bytes of parameters that the ranks exchange in one message


class ShardedStates:
    """Sharding of the states of all optimizers of a script; `install` makes it take effect.

    Args:
        session: Run of the script.
        level: 1: states; 2: gradients too; 3: parameters too.
    """

    def __init__(self, session: ScriptRun, level: int) -> None:
        self._session, self._level = session, level
        self._optimizers: list[weakref.ref[Optimizer]] = []  # in the order of their first steps
        self._owners: Any = WeakTensorKeyDictionary()
        self._loads = [0] * session.size  # elements that each rank owns
        self._groups: list[list[torch.Tensor]] = []  # parameters of the optimizer that is stepping
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []  # that the optimizer must not see, during a step

    def install(self) -> None:
        """Replace what happens before and after a step, and when states are read."""
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        read, states = Optimizer.state_dict, self

        def state_dict(self: Optimizer) -> Any:
            if self not in states._known():
                return read(self)
            with states.whole([self]):
                return read(self)

        Optimizer.state_dict = state_dict  # type: ignore[method-assign]
        if self._level > 1:
            self._session.home = self._owners.get
            self._session.sums.before = self._send_home
        if self._level > 2:
            add, states = Optimizer.add_param_group, self

            def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
                add(self, param_group)
                if _can_shard(self):
                    states._shard(self.param_groups[-1]["params"])

            Optimizer.add_param_group = add_param_group  # type: ignore[method-assign]

    def _shard(self, parameters: list[torch.Tensor]) -> None:
        """Leave the content of parameters that an optimizer gets on their owners. Collective."""
        forget_numbers()
        for p in parameters:
            if p.numel() >= LEAST and p not in self._owners:
                is_sharded = shard(self._session, p, self._next_owner())
                self._session.meet(f"a parameter of {tuple(p.shape)}{', sharded' if is_sharded else ''}")
                self._owner(p)

    def _send_home(self) -> None:
        """Let each sum that is the gradient of a parameter go to its owner."""
        for p, owner in self._owners.items():
            if (gradient := stored_sum(p)) is not None:
                gradient.cell.home = owner

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Hide the gradients of parameters that other ranks own."""
        if not _can_shard(optimizer):
            raise InputError(
                f"--parallel.zero shards optimizers of torch that update each parameter apart ({', '.join(_KINDS)}), "
                f"and not {type(optimizer).__name__}; leave it out", agreed=True,
            )  # fmt: skip
        if any(callable(x) for x in (*args[1:], *kwargs.values())):
            raise InputError(
                "--parallel.zero does not take closures in optimizer.step(closure); leave it out", agreed=True
            )
        if optimizer not in self._known():
            self._optimizers.append(weakref.ref(optimizer))
        owners = [self._owner(p) for p in _parameters(optimizer)]
        gradients = [p.grad for p in _parameters(optimizer)]  # which all ranks read, so all of them sum
        for p, owner, gradient in zip(_parameters(optimizer), owners, gradients, strict=True):
            is_mine = owner == self._session.rank
            if not is_mine:
                optimizer.state.pop(p, None)
            if gradient is not None and (not is_mine or type(gradient) is PendingSum):
                self._gradients.append((p, gradient))
                p.grad = gradient.local if is_mine else None  # type: ignore[attr-defined]
        self._groups = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self._content(optimizer, p) for p in group["params"]]

    def _content(self, optimizer: Any, p: torch.Tensor) -> torch.Tensor:
        """Return a parameter, or its content, with its gradient and its state, if this rank has it."""
        if type(p) is not ShardedParameter or (content := p.content.tensor) is None:
            return p
        content.grad, p.grad = p.grad, None
        if p in optimizer.state:
            optimizer.state[content] = optimizer.state.pop(p)
        return content

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Show the gradients again, and receive the parameters that other ranks have updated."""
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            for p, content in zip(parameters, group["params"], strict=True):
                if p is not content:
                    p.grad, content.grad = content.grad, None
                    if content in optimizer.state:
                        optimizer.state[p] = optimizer.state.pop(content)
            group["params"] = parameters
        for p, gradient in self._gradients:
            p.grad = gradient
        self._gradients = []
        buckets: dict[torch.dtype, list[torch.Tensor]] = {}
        nbytes = Counter[torch.dtype]()
        for p in _parameters(optimizer):
            if p.grad is not None and type(p) is not ShardedParameter:
                buckets.setdefault(p.dtype, []).append(p)
                nbytes[p.dtype] += p.nbytes
                if nbytes[p.dtype] >= _EXCHANGE:
                    self._exchange(buckets.pop(p.dtype))
                    nbytes[p.dtype] = 0
        for bucket in buckets.values():
            self._exchange(bucket)

    def _known(self) -> list[Optimizer]:
        """Return the optimizers that have taken a step."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def _owner(self, p: torch.Tensor) -> int:
        """Return the rank that owns a parameter: the one with the least so far when it was first met."""
        if p not in self._owners:
            self._owners[p] = owner = self._next_owner()
            self._loads[owner] += p.numel()
        return self._owners[p]

    def _next_owner(self) -> int:
        return self._loads.index(min(self._loads))

    def _exchange(self, parameters: list[torch.Tensor]) -> None:
        """Fill parameters of one dtype with the content that they have on their owners. Collective."""
        session, tensors = self._session, [p.detach() for p in parameters]
        owners = [self._owners[p] for p in parameters]
        order = sorted(range(len(tensors)), key=lambda i: owners[i])
        sizes = [0] * session.size
        for i in order:
            sizes[owners[i]] += tensors[i].numel()
        pieces = [tensors[i].reshape(-1) for i in order if owners[i] == session.rank]
        mine = torch.cat(pieces) if pieces else tensors[0].new_empty(0)
        session.meet(f"the exchange of {sum(sizes)} {tensors[0].dtype}")
        whole = tensors[0].new_empty(sum(sizes))
        session.world.all_gather(whole, mine, counts=sizes)
        start = 0
        for i in order:
            n = tensors[i].numel()
            if owners[i] != session.rank:
                tensors[i].copy_(whole[start : start + n].view(tensors[i].shape))
            start += n

    @contextmanager
    def whole(self, optimizers: list[Optimizer] | None = None) -> Iterator[None]:
        """Have all states on every rank in the body of the `with` statement. Collective.

        Args:
            optimizers: Optimizers whose states are read; default is all.
        """
        chosen = self._known() if optimizers is None else optimizers
        for optimizer in chosen:
            states = {p: self._receive(optimizer.state.get(p), self._owner(p)) for p in _parameters(optimizer)}
            optimizer.state.clear()
            optimizer.state.update({p: state for p, state in states.items() if state is not None})
        try:
            yield
        finally:
            for optimizer in chosen:
                for p in _parameters(optimizer):
                    if self._owners[p] != self._session.rank:
                        optimizer.state.pop(p, None)

    def _receive(self, state: dict[str, Any] | None, owner: int) -> dict[str, Any] | None:
        """Return the state that the owner of a parameter has of it. Collective."""
        world, is_owner = self._session.world, owner == self._session.rank
        facts = None if state is None else [[n, *_describe(x)] for n, x in state.items()]
        facts = world.broadcast_object(facts, owner)
        if facts is None or (is_owner and state is None):
            return None
        out = {}
        for name, kind, value in facts:
            if kind == "value":
                out[name] = value
                continue
            shape, device = value
            x = state[name] if is_owner and state is not None else None
            x = torch.empty(shape, dtype=getattr(torch, kind), device=device) if x is None else x
            flat = x.detach().contiguous().reshape(-1)
            world.broadcast(flat, owner)
            out[name] = x if is_owner else flat.view(shape)
        return out


def _describe(x: Any) -> list[Any]:
    if isinstance(x, torch.Tensor):
        return [str(x.dtype).removeprefix("torch."), [list(x.shape), x.device.type]]
    return ["value", x]


def _can_shard(optimizer: Any) -> bool:
    return type(optimizer).__name__ in _KINDS and type(optimizer).__module__.startswith("torch.optim")


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
