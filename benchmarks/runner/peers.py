"""Peers of mpitrain: torch.distributed in the same processes, plain MPI, and training by torch and DeepSpeed."""

from __future__ import annotations

import fcntl
import gc
import importlib
import importlib.util
import os
import socket
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.runner.report import ROOT
from mpitrain.comm import Communicator
from mpitrain.comm.inspection import PlainMPI
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.buffers import MPI_TYPES
from mpitrain.comm.runtime.agreement import Call
from mpitrain.config.settings import Config
from mpitrain.errors import CommunicationError, InputError
from mpitrain.models.gpt import GPT
from mpitrain.shard.ddp import DistributedDataParallel
from mpitrain.shard.flat import blocks_of
from mpitrain.trainer.engine import Engine

_PATIENCE = timedelta(seconds=300)
_INTERFACE = "GLOO_SOCKET_IFNAME"  # environment variable of gloo: the network interface to use
_SIOCGIFADDR = 0x8915  # netdevice(7)


def gloo(world: Communicator) -> AbstractContextManager[None]:
    """Return a context with torch.distributed's default group over gloo, of the ranks in `world`. Collective."""
    return _over("gloo", world)


@contextmanager
def on_device(world: Communicator, device: torch.device, exclusive: bool) -> Iterator[str]:
    """Create torch.distributed's default group for tensors on a device, for the `with` block. Collective.

    Args:
        world: Communicator of all ranks.
        device: Device of this rank.
        exclusive: True if no two ranks share a device; vendors' libraries refuse shared devices.

    Yields:
        Name of the backend: torch's default for the device if `exclusive`, else mpitrain's; "" if there is one rank.
    """
    if world.size == 1:
        yield ""
        return
    import mpitrain.backend

    name = dist.get_default_backend_for_device(device) if exclusive else mpitrain.backend.NAME
    if name == mpitrain.backend.NAME:
        dist.init_process_group(name, timeout=_PATIENCE)
        yield name
        dist.destroy_process_group()
        return
    with _over(name, world):
        yield name


@contextmanager
def _over(backend: str, world: Communicator) -> Iterator[None]:
    """Create torch.distributed's default group over one of its own backends, for the `with` block. Collective.

    The ranks meet at a TCP store on rank 0, whose port the system chooses. On one node it uses the loopback interface;
    on several nodes, the interface in GLOO_SOCKET_IFNAME or, by default, the first one with an address.
    """
    os.environ.setdefault(_INTERFACE, "lo" if world.num_nodes == 1 else _first_interface())
    host = world.broadcast_object(_address(os.environ[_INTERFACE]) if world.rank == 0 else "")
    store = None
    if world.rank == 0:
        store = dist.TCPStore(host, 0, world.size, is_master=True, timeout=_PATIENCE, wait_for_workers=False)
    port = world.broadcast_object(store.port if store is not None else 0)
    if store is None:
        store = dist.TCPStore(host, port, world.size, is_master=False, timeout=_PATIENCE)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=_PATIENCE)
    yield  # no barrier after an error, because the other ranks may not reach it
    world.barrier()
    dist.destroy_process_group()
    world.barrier()  # the store must exist until every rank has used it for the last time


@contextmanager
def plain_sockets(world: Communicator, nbytes: int) -> Iterator[dict[str, Call]]:
    """Yield {"tcp": call} between hosts of tests/cluster/namespace_hosts.py, {} elsewhere. Collective.

    Args:
        world: Communicator of all ranks; every host has the same number.
        nbytes: Bytes that the call exchanges between all hosts: each host has an equal part for each host.
    """
    if "MPITRAIN_FIRST_HOST" not in os.environ:
        yield {}
        return
    sys.path.insert(0, str(ROOT / "tests/cluster"))
    with importlib.import_module("plain_sockets").exchange(world, nbytes // world.num_nodes) as call:
        yield {"tcp": call}


@contextmanager
def rpc(world: Communicator, folder: Path) -> Iterator[Any]:
    """Start torch.distributed.rpc over TensorPipe for the `with` block, with rank N as worker "N". Collective.

    Args:
        world: Communicator of all ranks.
        folder: Empty folder that all ranks share, where they find each other.

    Yields:
        The module torch.distributed.rpc.
    """
    from torch.distributed import rpc as module

    os.environ.setdefault("TP_SOCKET_IFNAME", "lo" if world.num_nodes == 1 else _first_interface())
    options: dict[str, Any] = {"init_method": f"file://{folder / 'rpc'}"}
    if world.num_nodes > 1:  # use the network, even if the nodes are network namespaces of one machine
        options |= {"_transports": ["uv"], "_channels": ["mpt_uv", "basic"]}
    backend_options = module.TensorPipeRpcBackendOptions(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about functions that it calls itself
        module.init_rpc(str(world.rank), rank=world.rank, world_size=world.size, rpc_backend_options=backend_options)
    yield module
    world.barrier()
    module.shutdown()


def fully_sharded(model: Any, group: Any) -> Any:
    """Apply FSDP2 to a model, with each of its blocks as a unit, and return it.

    Args:
        model: Model with blocks, see `blocks_of`.
        group: Process group of torch.distributed.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# -- plain MPI: collectives as a user of mpi4py would call them, without code of mpitrain -----------


class PlainCollectives(PlainMPI):
    """MPI collectives of CPU tensors on the ranks of a communicator.

    Each method returns a call without arguments, which keeps its tensors alive.
    """

    def all_reduce(self, x: torch.Tensor) -> Call:
        """Return a call that sums `x` over all ranks, in place; for fp32, mpi4py inspects the array at each call."""
        if x.dtype == torch.float16:
            return partial(self._comm.Allreduce, MPI.IN_PLACE, [x.numpy(), x.numel(), MPI.FLOAT16_T], MPI.SUM)
        return partial(self._comm.Allreduce, MPI.IN_PLACE, x.numpy(), MPI.SUM)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> Call:
        """Return a call that sums over all ranks and stores this rank's block of the sum.

        Args:
            out: Block of this rank, written by the call.
            x: Vector to sum, with one block per rank.
        """
        return partial(self._comm.Reduce_scatter_block, x.numpy(), out.numpy(), MPI.SUM)

    def all_gather(self, out: torch.Tensor) -> Call:
        """Return a call that gathers blocks in place: `out` already contains this rank's block."""
        count = out.numel() // self._comm.size
        return partial(self._comm.Allgather, MPI.IN_PLACE, [out.numpy(), count, MPI_TYPES[out.dtype]])

    @property
    def adds_fp16(self) -> bool:
        """True if the MPI library can sum fp16, tested with a small sum. Collective."""
        if MPI.FLOAT16_T == MPI.DATATYPE_NULL:
            return False
        x = torch.full((4,), 1.5, dtype=torch.float16)
        try:
            self.all_reduce(x)()
        except MPI.Exception:
            return False
        return bool((x == 1.5 * self._comm.size).all())


# -- training by peers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PeerTraining:
    """The training of a model by a peer.

    Attributes:
        model: Wrapped model.
        optimizer: Optimizer of the model.
        gradients: Function (x, y) that computes the gradients and returns this rank's loss.
        update: Function that updates the parameters.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    gradients: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    update: Callable[[], object]


Loss = Callable[[Any, torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
MakePeer = Callable[..., PeerTraining]  # has the arguments of `torch_training`


def peers() -> dict[str, MakePeer]:
    """Return all peers by name: functions that start the training on torch.distributed's default group.

    The functions have the arguments (module, loss, make_optimizer). DeepSpeed is a peer if it is installed (extra
    `peers`).
    """
    stages = (1, 2, 3) if importlib.util.find_spec("deepspeed") else ()
    ddp = partial(nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)
    return {
        "torch DDP": partial(torch_training, wrap=ddp),
        "FSDP2": partial(torch_training, wrap=lambda model: fully_sharded(model, dist.group.WORLD)),
        **{f"DeepSpeed ZeRO-{stage}": partial(_deepspeed_training, stage=stage) for stage in stages},
    }


def torch_training(
    module: nn.Module,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    *,
    wrap: Any = None,
    precision: Any = nullcontext,
    every: int = 1,
) -> PeerTraining:
    """Return the training of a module by plain torch.

    Args:
        module: Module to train.
        loss: Function (output, y) that returns the loss.
        make_optimizer: Function that creates the optimizer of the wrapped module.
        wrap: Function that wraps the module; None: it is not wrapped, and every rank trains alone.
        precision: Function that returns a context for the forward pass, such as autocast.
        every: Number of passes whose gradients are added before they are reduced (`no_sync`) and the model is updated.
    """
    model: Any = module if wrap is None else wrap(module)
    optimizer, count = make_optimizer(model), 0

    def gradients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal count
        if count % every == 0:
            optimizer.zero_grad(set_to_none=True)
        count += 1
        with model.no_sync() if count % every else nullcontext():
            with precision():
                value = loss(model(x), y)
            value.backward()
        return value.detach()

    return PeerTraining(model, optimizer, gradients, lambda: None if count % every else optimizer.step())


def _deepspeed_training(module: nn.Module, loss: Loss, make_optimizer: MakeOptimizer, *, stage: int) -> PeerTraining:
    """Return the training of a module by DeepSpeed on CPUs and the existing gloo group, without its log messages.

    DeepSpeed sets the gradients to zero in its step, and hides where its tensors are.
    """
    # DeepSpeed requires the launcher's number, which need not follow the order of ranks
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")}
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.utils.logger.setLevel("ERROR")
    optimizer = make_optimizer(module)
    config = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 1 << 40, "zero_optimization": {"stage": stage}}
    # by default it clips at 1, and it knows only its own AdamW
    config |= {"gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    for state in optimizer.state.values():  # it took a step without gradients to allocate them
        state["step"].zero_()

    def gradients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        value = loss(engine(x), y)
        engine.backward(value)
        return value.detach()

    return PeerTraining(engine, optimizer, gradients, engine.step)


def require_equal(losses: Mapping[str, Sequence[float]], tolerance: float) -> None:
    """Check that all contenders have the losses of the first one.

    Args:
        losses: Losses of each contender, by name.
        tolerance: Largest relative difference.

    Raises:
        CommunicationError: The losses of a contender differ, so its time cannot be compared.
    """
    expected = next(iter(losses.values()), ())
    for name, of in losses.items():
        if any(not abs(a - b) <= tolerance * abs(b) for a, b in zip(of, expected, strict=True)):
            shown = "; ".join(f"{one} {', '.join(f'{loss:.5f}' for loss in each)}" for one, each in losses.items())
            raise CommunicationError(f"the contenders reach different losses: {shown}; {name} differs")


# -- the contenders of a training step ---------------------------------------------------------------------
#
# All contenders start from the same weights and get the same batches: a stream of random tokens, seeded by the rank and
# restarted for each contender. All use torch's fused AdamW without clipping.

RATE = 1e-4
SINGLE = "one process"


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT with 64 features per head.

    Attributes:
        vocabulary: Number of tokens in the vocabulary.
        layers: Number of blocks.
        width: Features per token.
        tokens: Tokens per sample.
    """

    vocabulary: int
    layers: int
    width: int
    tokens: int

    def build(self) -> GPT:
        """Return a new model; its weights are the same at each call."""
        torch.manual_seed(1)
        return GPT(self.vocabulary, self.layers, self.width, max(1, self.width // 64))

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return self.layers * (12 * self.width**2 + 13 * self.width) + (self.vocabulary + 2) * self.width


Batch = tuple[torch.Tensor, torch.Tensor]


def batches(shape: Shape, samples: int, rank: int) -> Iterator[Batch]:
    """Yield random batches (tokens, next tokens), each [samples, tokens]; none repeats, so none can be memorized.

    Args:
        shape: Sizes of the model.
        samples: Samples per batch.
        rank: Number of the rank, the seed of its batches.
    """
    generator = torch.Generator().manual_seed(rank)
    while True:
        drawn = torch.randint(shape.vocabulary, (samples, shape.tokens + 1), generator=generator)
        yield drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


@dataclass
class Trainee:
    """One contender's training of a model; the constructor draws the first batch.

    Attributes:
        batches: Batches of this rank.
        forward_backward: Function (x, y) that computes the gradients and returns this rank's part of the mean loss over
            all ranks.
        update: Function that updates the parameters.
        release: Function that shuts the contender down before its memory is freed.
        loss: This rank's part of the loss in the last step; None before the first one.
    """

    batches: Iterator[Batch]
    forward_backward: Callable[[torch.Tensor, torch.Tensor], Any]
    update: Callable[[], object]
    release: Callable[[], object] = lambda: None
    loss: Any = None

    def __post_init__(self) -> None:
        self.prepare()

    def prepare(self) -> None:
        """Draw the next batch."""
        self._batch = next(self.batches)

    def step(self) -> None:
        """Compute the gradients of the batch and update. Collective, except for the contender `SINGLE`."""
        self.loss = self.forward_backward(*self._batch)
        self.update()

    def close(self) -> None:
        """Shut the contender down and free its memory. Collective."""
        self.release()
        self.__dict__.clear()
        gc.collect()  # wrappers and hooks refer to each other


# function (world, shape, batches, samples per rank, device); device None: fp32 on the CPU, else bf16 on that device
Build = Callable[[Communicator, Shape, Iterator[Batch], int, torch.device | None], Trainee]
OURS: dict[str, dict[str, Any]] = {  # sections [parallel] of our engine
    **{f"ZeRO-{stage}": {"zero": stage} for stage in (0, 1, 2, 3)},
    "ZeRO-3 gathered": {"zero": 3, "share_node": False},
}
OUR_DDP = "DistributedDataParallel"


def contenders() -> dict[str, Build]:
    """Return all contenders by name: functions that create one."""
    wrapped: dict[str, MakePeer] = {
        SINGLE: torch_training,
        OUR_DDP: partial(torch_training, wrap=DistributedDataParallel),
        **peers(),
    }
    builds = {name: partial(_wrapped, make=make) for name, make in wrapped.items()}
    engines = {name: partial(_engine, parallel=parallel) for name, parallel in OURS.items()}
    return {SINGLE: builds.pop(SINGLE), **engines, **builds}


def contender(
    name: str, world: Communicator, shape: Shape, samples: int, of: Iterator[Batch] | None = None, device: Any = None
) -> Trainee:
    """Create a contender. Collective.

    Args:
        name: Name of a contender that can run here.
        world: Communicator of all ranks.
        shape: Sizes of the model.
        samples: Samples per rank and batch.
        of: Batches of this rank; None: `batches` from the start.
        device: Device on which to train in bf16; None: the CPU, in fp32.
    """
    return contenders()[name](world, shape, of or batches(shape, samples, world.rank), samples, device)


def mean_losses(world: Communicator, trainees: Mapping[str, Trainee], tolerance: float) -> dict[str, float]:
    """Return the last loss of each contender over all ranks, by name. Collective.

    Args:
        world: Communicator of all ranks.
        trainees: Contenders by name.
        tolerance: Largest relative difference of two losses.

    Raises:
        CommunicationError: The losses of two contenders differ; the contender `SINGLE` is not compared.
    """
    losses = np.array([float(trainee.loss) for trainee in trainees.values()])
    world.all_reduce(losses)
    means = dict(zip(trainees, losses.tolist(), strict=True))
    require_equal({name: [loss] for name, loss in means.items() if name != SINGLE}, tolerance)
    return means


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def _wrapped(
    world: Communicator, shape: Shape, of: Iterator[Batch], samples: int, device: torch.device | None, make: MakePeer
) -> Trainee:
    model, keywords = shape.build().to(device), dict[str, Any]()
    if device is not None:
        keywords["precision"] = partial(torch.autocast, device.type, torch.bfloat16)
    peer = make(model, model.loss, _optimizer, **keywords)
    return Trainee(of, lambda x, y: peer.gradients(x, y) / world.size, peer.update)


def _engine(
    world: Communicator, shape: Shape, of: Iterator[Batch], samples: int, device: torch.device | None, parallel: Any
) -> Trainee:
    model, train = shape.build().to(device), {"clip": 0.0, "precision": "fp32" if device is None else "bf16"}
    engine = Engine(
        model, model.loss, _optimizer(model), world, Config.from_dict({"parallel": parallel, "train": train})
    )

    def forward_backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return engine.forward_backward([[(x, y)]], len(x) * world.size)[0]

    return Trainee(of, forward_backward, engine.step, engine.close)


# -- interfaces of a network -------------------------------------------------------------------------------


def _first_interface() -> str:
    for _, name in socket.if_nameindex():
        if name != "lo" and _address(name):
            return name
    raise InputError(f"no network interface has an IPv4 address; set {_INTERFACE} to the interface to use")


def _address(interface: str) -> str:
    """Return the IPv4 address of a network interface; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return ""
