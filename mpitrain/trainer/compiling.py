"""`model.compile`: torch.compile of a model's blocks.

Each block is compiled in place when it is called first, so that names in the model's state stay as they are. What lies
between blocks, and the hooks on parameters, which reduce gradients, run as ever. What was tried and does not compile is
refused at the start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from mpitrain.comm import Communicator
from mpitrain.comm.memory.device import is_accelerator
from mpitrain.errors import InputError, refusal
from mpitrain.mesh import uncompiled
from mpitrain.trainer.engine import Engine
from mpitrain.trainer.folder import together


def compile_blocks(blocks: Sequence[nn.Module], engine: Engine, world: Communicator) -> None:
    """Compile the blocks of an engine's module. Collective.

    Args:
        blocks: Of the model before it was divided; those on this rank are meant.
        engine: What trains them.
        world: All ranks that train the model.

    Raises:
        InputError: There are no blocks, they do not compile under this engine, or a compiler is missing somewhere.
    """
    if not blocks:
        raise refusal(
            "model.compile finds no blocks in the model: put its layers into a ModuleList or Sequential, or set it to "
            "false"
        )
    if why := uncompiled(engine.sharding.parameters.gathers, engine.synchronous and engine.comm.size > 1):
        raise refusal(why)
    together(world, lambda: require_compiler(engine.device))
    import torch._inductor.config as inductor

    inductor.fallback_random = True  # dropout draws the numbers that it draws without the compiler
    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = 1  # else each rank starts a process for every core
    mine = set(engine.module.modules())
    for block in blocks:
        if block in mine:
            block.compile()


def require_compiler(device: torch.device) -> None:
    """Raise InputError where what torch.compile needs for a kind of device is not there."""
    if is_accelerator(device):
        from torch.utils._triton import has_triton

        if not has_triton():
            raise InputError(
                f"model.compile needs Triton for {device.type} devices, and PyTorch finds none; install it, or set "
                "model.compile to false"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # of several kinds, in a part of PyTorch that is not documented
        raise InputError(
            f"model.compile needs a C++ compiler on the CPU, and PyTorch finds none ({type(error).__name__}); load one "
            "(g++ or clang, or name it in CXX), or set model.compile to false"
        ) from error
