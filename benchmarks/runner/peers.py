"""The peers: torch.distributed in the same processes as the ranks, plain MPI, and training by torch and DeepSpeed."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
import socket
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.comm.inspection import PlainMPI
from mpitrain.comm.job.mpi import MPI
from mpitrain.comm.memory.buffers import MPI_TYPES
from mpitrain.comm.runtime.agreement import Call
from mpitrain.config.settings import Config
from mpitrain.errors import CommunicationError, InputError
from mpitrain.models.gpt import GPT
from mpitrain.trainer.engine import Engine

_PATIENCE = timedelta(seconds=300)
_INTERFACE = "GLOO_SOCKET_IFNAME"  # gloo's own setting: the network interface to use
_SIOCGIFADDR = 0x8915  # netdevice(7)


def gloo(world: Communicator) -> AbstractContextManager[None]:
    """torch.distributed's default group over gloo, with the ranks of `world`, while inside. Collective."""
    return _over("gloo", world)


@contextmanager
def on_device(world: Communicator, device: torch.device, own: bool) -> Iterator[str]:
    """torch.distributed's default group for tensors on a device, while inside. Collective.

    Args:
        world: The ranks.
        device: This rank's.
        own: Whether no two ranks share one, which the libraries of makers refuse.

    Yields:
        The name of its backend: the one that torch has for the kind of device, else ours; "" for one rank.
    """
    if world.size == 1:
        yield ""
        return
    import mpitrain.backend

    name = dist.get_default_backend_for_device(device) if own else mpitrain.backend.NAME
    if name == mpitrain.backend.NAME:
        dist.init_process_group(name, timeout=_PATIENCE)
        yield name
        dist.destroy_process_group()
        return
    with _over(name, world):
        yield name


@contextmanager
def _over(backend: str, world: Communicator) -> Iterator[None]:
    """torch.distributed's default group over one of its own backends, while inside. Collective.

    The ranks meet at a store on rank 0, at a port the system chose. On one node that is the loopback interface;
    between nodes the one that GLOO_SOCKET_IFNAME names, or else the first that has an address.
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
    yield  # after an error the other ranks may be anywhere: no meeting then
    world.barrier()
    dist.destroy_process_group()
    world.barrier()  # the store must outlive everybody's last look at it


@contextmanager
def rpc(world: Communicator, folder: Path) -> Iterator[Any]:
    """torch.distributed.rpc over TensorPipe, rank N as worker "N", while inside. Collective.

    Args:
        world: The ranks.
        folder: Where they find each other: an empty folder that all of them see.

    Yields:
        The module.
    """
    from torch.distributed import rpc as module

    os.environ.setdefault("TP_SOCKET_IFNAME", "lo" if world.num_nodes == 1 else _first_interface())
    options: dict[str, Any] = {"init_method": f"file://{folder / 'rpc'}"}
    if world.num_nodes > 1:  # by the network also where nodes are network namespaces of one machine
        options |= {"_transports": ["uv"], "_channels": ["mpt_uv", "basic"]}
    made = module.TensorPipeRpcBackendOptions(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch calls itself
        module.init_rpc(str(world.rank), rank=world.rank, world_size=world.size, rpc_backend_options=made)
    yield module
    world.barrier()
    module.shutdown()


def fully_sharded(model: Any, group: Any) -> Any:
    """The model under FSDP2, over a process group: each of its blocks is a unit."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# -- plain MPI: collectives as a user of mpi4py would call them, nothing of ours in between ---------


class PlainCollectives(PlainMPI):
    """Collectives on the ranks of a communicator, for CPU tensors, which the calls keep alive."""

    def all_reduce(self, x: torch.Tensor) -> Call:
        """Sum in place. For fp32 mpi4py is given the array itself, and looks at it at each call."""
        if x.dtype == torch.float16:
            return partial(self._comm.Allreduce, MPI.IN_PLACE, [x.numpy(), x.numel(), MPI.FLOAT16_T], MPI.SUM)
        return partial(self._comm.Allreduce, MPI.IN_PLACE, x.numpy(), MPI.SUM)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> Call:
        """Sum x; out becomes this rank's block of the sum."""
        return partial(self._comm.Reduce_scatter_block, x.numpy(), out.numpy(), MPI.SUM)

    def all_gather(self, out: torch.Tensor) -> Call:
        """Gather in place: this rank's block lies in out."""
        count = out.numel() // self._comm.size
        return partial(self._comm.Allgather, MPI.IN_PLACE, [out.numpy(), count, MPI_TYPES[out.dtype]])

    @property
    def adds_fp16(self) -> bool:
        """True if the MPI library can sum fp16. Collective: a small sum is tried."""
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
    """A model in training by a peer.

    Attributes:
        model: What is called.
        optimizer: Its optimizer.
        gradients: Gives the gradients of x and y, and returns this rank's loss.
        update: Applies them.
        release: Ends what is to be ended before the memory goes.
        hides: Whether its parameters and gradients lie in buffers that it keeps to itself.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    gradients: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    update: Callable[[], object]
    release: Callable[[], object] = lambda: None
    hides: bool = False


Loss = Callable[[Any, torch.Tensor], torch.Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
MakePeer = Callable[..., PeerTraining]  # of the arguments of `of_torch`


def peers() -> dict[str, MakePeer | str]:
    """By name, what trains a module on torch.distributed's default group, or why it cannot run here.

    It is given the module, the loss of its output, what makes the optimizer, the ranks, and a rank's samples.
    """
    missing = importlib.util.find_spec("deepspeed") is None
    return {
        "torch DDP": partial(of_torch, wrap=ddp),
        "FSDP2": partial(of_torch, wrap=lambda model: fully_sharded(model, dist.group.WORLD)),
        **{
            f"DeepSpeed ZeRO-{stage}": "not installed" if missing else partial(_of_deepspeed, stage=stage)
            for stage in (1, 2, 3)
        },
    }


def ddp(model: nn.Module, group: Any = None) -> nn.Module:
    """The model under DistributedDataParallel, gradients as views of the buckets."""
    return nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def of_torch(
    module: nn.Module,
    loss: Loss,
    make_optimizer: MakeOptimizer,
    *_: Any,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> PeerTraining:
    """Training by plain torch.

    Args:
        module: What is trained.
        loss: Of its output.
        make_optimizer: Makes the optimizer of what was wrapped.
        _: The ranks and their samples, which other peers need to know.
        wrap: Makes of the module what is trained; by itself every rank trains alone.
        precision: A context for the forward pass.
    """
    model = wrap(module)
    optimizer = make_optimizer(model)

    def gradients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with precision():
            found = loss(model(x), y)
        found.backward()
        return found.detach()

    return PeerTraining(model, optimizer, gradients, optimizer.step)


def _of_deepspeed(
    module: nn.Module, loss: Loss, make_optimizer: MakeOptimizer, world: Communicator, samples: int, *, stage: int
) -> PeerTraining:
    """DeepSpeed, which sets the gradients to zero in its step; for CPUs, quiet, and on the gloo group there is."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # it refuses another number than the launcher's, which need not count in order of rank
    os.environ.setdefault("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", str(world.local_rank)))
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    optimizer = make_optimizer(module)
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # its default is 1, and nobody else clips
        "zero_allow_untested_optimizer": True,  # it knows its own AdamW only
        "steps_per_print": 1 << 40,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    for state in optimizer.state.values():
        state["step"].zero_()  # it made a step without gradients, to allocate the states; bias correction counts it

    def gradients(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = loss(engine(x), y)
        engine.backward(found)
        return found.detach()

    return PeerTraining(engine, optimizer, gradients, engine.step, engine.destroy, hides=True)


def require_alike(losses: Mapping[str, Sequence[float]], tolerance: float) -> None:
    """Make sure that all contenders have come to the losses of the first, but for a share of `tolerance`.

    Raises:
        CommunicationError: One of them has not, and nothing can be compared.
    """
    expected = next(iter(losses.values()), ())
    for name, of in losses.items():
        if any(not abs(a - b) <= tolerance * abs(b) for a, b in zip(of, expected, strict=True)):
            told = "; ".join(f"{one} {', '.join(f'{loss:.5f}' for loss in each)}" for one, each in losses.items())
            raise CommunicationError(f"the contenders do not train the same: losses {told}; {name} differs")


# -- the contenders of a training step ---------------------------------------------------------------------
#
# Each begins with the same weights and gets the same batches: a rank's stream of random tokens, which is seeded by the
# rank and begins anew for each contender. All update with torch's fused AdamW and clip nothing.

RATE = 1e-4
ALONE = "one process"


@dataclass(frozen=True)
class Shape:
    """What is trained: a GPT, with heads of 64 features.

    Attributes:
        vocabulary: How many tokens there are.
        layers: Its blocks.
        width: Its features.
        tokens: Those of a sample.
    """

    vocabulary: int
    layers: int
    width: int
    tokens: int

    def build(self) -> GPT:
        """Make the model, with the same weights at each call."""
        torch.manual_seed(1)
        return GPT(self.vocabulary, self.layers, self.width, max(1, self.width // 64))

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return self.layers * (12 * self.width**2 + 13 * self.width) + (self.vocabulary + 2) * self.width


Batch = tuple[torch.Tensor, torch.Tensor]


def batches(shape: Shape, samples: int, rank: int) -> Iterator[Batch]:
    """A rank's tokens and the token after each, [samples, tokens]; each is new, so that none is known by heart."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        drawn = torch.randint(shape.vocabulary, (samples, shape.tokens + 1), generator=generator)
        yield drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


@dataclass
class Trainee:
    """A model in training; it begins with the first batch.

    Attributes:
        batches: This rank's.
        forward_backward: Gives the gradients of x and y, and returns the rank's part of the mean loss of all ranks.
        update: Applies them.
        release: Ends what is to be ended before the memory goes.
        account: Gives bytes by category, where the contender counts them.
        loss: Of the last step, once there was one.
    """

    batches: Iterator[Batch]
    forward_backward: Callable[[torch.Tensor, torch.Tensor], Any]
    update: Callable[[], object]
    release: Callable[[], object] = lambda: None
    account: Callable[[], dict[str, int]] | None = None
    loss: Any = None

    def __post_init__(self) -> None:
        self.prepare()

    def prepare(self) -> None:
        """Draw the next batch."""
        self._batch = next(self.batches)

    def step(self) -> None:
        """Gradients of the batch, and the update. Collective, but for one process alone."""
        self.loss = self.forward_backward(*self._batch)
        self.update()

    def close(self) -> None:
        """Give the memory back. Collective."""
        self.release()
        self.__dict__.clear()
        gc.collect()  # wrappers and hooks refer to each other


# the last is the device on which to train in bf16: ours by itself, plain torch by autocast; None: on the CPU in fp32
Build = Callable[[Communicator, Shape, Iterator[Batch], int, torch.device | None], Trainee]
_OURS: dict[str, dict[str, Any]] = {
    "DDP": {"zero": 0},
    **{f"ZeRO-{stage}": {"zero": stage} for stage in (1, 2, 3)},
    "ZeRO-3 gathered": {"zero": 3, "share_node": False},
}


def contenders() -> dict[str, Build | str]:
    """By name: how to make it, or why it cannot run here."""
    found: dict[str, Build | str] = {ALONE: partial(_theirs, make=of_torch)}
    found |= {name: partial(_ours, parallel=parallel) for name, parallel in _OURS.items()}
    return found | {name: m if isinstance(m, str) else partial(_theirs, make=m) for name, m in peers().items()}


def contender(
    name: str,
    world: Communicator,
    shape: Shape,
    samples: int,
    of: Iterator[Batch] | None = None,
    device: torch.device | None = None,
) -> Trainee:
    """One that can run here. Collective.

    Args:
        name: Its name.
        world: The ranks.
        shape: What is trained.
        samples: Of a rank's batch.
        of: The rank's batches, instead of new ones from the first on.
        device: Where to train in bf16; None: on the CPU, in fp32.
    """
    build = contenders()[name]
    assert not isinstance(build, str)
    return build(world, shape, of or batches(shape, samples, world.rank), samples, device)


def mean_losses(world: Communicator, trainees: Mapping[str, Trainee], tolerance: float) -> dict[str, float]:
    """The last loss of each, over all ranks. Collective.

    Raises:
        CommunicationError: Two of them disagree; one process alone is none of them.
    """
    losses = np.array([float(trainee.loss) for trainee in trainees.values()])
    world.all_reduce(losses)
    found = dict(zip(trainees, losses.tolist(), strict=True))
    require_alike({name: [loss] for name, loss in found.items() if name != ALONE}, tolerance)
    return found


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)


def _theirs(
    world: Communicator, shape: Shape, of: Iterator[Batch], samples: int, device: torch.device | None, make: MakePeer
) -> Trainee:
    model, keywords = shape.build().to(device), dict[str, Any]()
    if device is not None:
        keywords["precision"] = partial(torch.autocast, device.type, torch.bfloat16)
    peer = make(model, model.loss, _optimizer, world, samples, **keywords)
    return Trainee(of, lambda x, y: peer.gradients(x, y) / world.size, peer.update, peer.release)


def _ours(
    world: Communicator, shape: Shape, of: Iterator[Batch], samples: int, device: torch.device | None, parallel: Any
) -> Trainee:
    model, train = shape.build().to(device), {"clip": 0.0, "precision": "fp32" if device is None else "bf16"}
    engine = Engine(
        model, model.loss, _optimizer(model), world, Config.from_dict({"parallel": parallel, "train": train})
    )

    def forward_backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return engine.forward_backward([[(x, y)]], len(x) * world.size)[0]

    def account() -> dict[str, int]:
        values = asdict(engine.memory())
        return {name: nbytes for name, nbytes in values.items() if name != "expected"}

    return Trainee(of, forward_backward, engine.step, engine.close, account)


# -- interfaces of a network -------------------------------------------------------------------------------


def _first_interface() -> str:
    for _, name in socket.if_nameindex():
        if name != "lo" and _address(name):
            return name
    raise InputError(f"no network interface has an IPv4 address; name the one to use in {_INTERFACE}")


def _address(interface: str) -> str:
    """The interface's IPv4 address; empty where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            return socket.inet_ntoa(fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return ""
