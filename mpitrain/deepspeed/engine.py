"""Engines with DeepSpeed's methods, each of which calls an engine of `mpitrain.initialize`."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from mpitrain.deepspeed.names import explain_missing_method
from mpitrain.deepspeed.utils import RepeatingLoader
from mpitrain.errors import InputError, refusal
from mpitrain.storage.disk import write_whole
from mpitrain.trainer.user_loop.training_engine import PipelineEngine, TrainingEngine

LATEST = "latest"  # file with the tag of the newest checkpoint
ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()  # where `zero.GatheredParameters` looks for a parameter's engine


class EngineSchedule:
    """A learning rate schedule of the configuration, which the engine follows; `initialize` returns it.

    Args:
        engine: Engine that sets the rates.
    """

    def __init__(self, engine: TrainingEngine) -> None:
        self._engine = engine

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of the next update, of each parameter group."""
        return [float(group["lr"]) for group in self._engine.optimizer.param_groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, int]:
        """Return the number of the last batch, for a script's own records; `save_checkpoint` has the schedule."""
        return {"last_batch_iteration": self._engine.steps - self._engine.skipped - 1}

    def step(self, *_: Any) -> None:
        """Raise InputError: the engine's `step` advances the schedule."""
        raise InputError("engine.step() advances the configuration's scheduler; remove the call of scheduler.step()")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise InputError: the engine's `load_checkpoint` loads the schedule."""
        raise InputError("engine.load_checkpoint loads the scheduler; remove the call of scheduler.load_state_dict()")


class DeepSpeedEngine(nn.Module):
    """A model that trains on all ranks.

    Args:
        engine: Engine that trains the model.
        values: Values of the configuration.
        training_data: Data set of `training_dataloader`; None for none.
        collate_fn: Function that makes a batch from samples; None for torch's.

    Attributes:
        module: The model, or this rank's stage of it.
        optimizer: Optimizer of this rank's part.
        lr_scheduler: Scheduler; None without one.
        training_dataloader: DataLoader of this rank's microbatches; None without data.
        device: Device of this rank.
        global_rank: Number of this rank; `local_rank` is that on its node, `world_size` the number of ranks.
        dp_world_size: Number of ranks that read different samples.
    """

    shuffles = True  # the order of `training_dataloader`

    def __init__(self, engine: TrainingEngine, values: Mapping[str, Any], training_data: Any, collate_fn: Any) -> None:
        super().__init__()
        world = engine.mesh.world
        self._engine, self._values, self._collate_fn = engine, values, collate_fn
        self.module, self.optimizer, self.device = engine.module, engine.optimizer, engine.device
        self.global_rank, self.local_rank, self.world_size = world.rank, world.local_rank, world.size
        self.dp_world_size, self.mp_world_size = engine.data_size, 1
        self.lr_scheduler = EngineSchedule(engine) if engine.settings.schedule is not None else engine.scheduler
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)
        self._backwards = self._before = self._steps_before = 0
        self._engine.defers = True  # until a step has shown that each `step` follows one `backward`
        engine.show_next_rate()
        ENGINES.add(self)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        if name != "module" and hasattr(self.module, name):
            return getattr(self.module, name)
        raise explain_missing_method(type(self).__name__, name)

    # -- a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the model's output for a microbatch."""
        return self._engine.output_of(*inputs, **kwargs)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Add the gradients of a microbatch's mean loss, and return the loss divided by the accumulation steps.

        It may be called several times before `step`, but then as often in the first step as in each later one.

        Args:
            loss: A scalar.
            retain_graph: Only False.
            scale_wrt_gas: Only True.
        """
        if retain_graph or not scale_wrt_gas:
            raise refusal("engine.backward has no retain_graph and no scale_wrt_gas=False; add the losses first")
        self._engine.backward(loss)
        self._backwards += 1
        return loss.detach() / self.gradient_accumulation_steps()

    def step(self, lr_kwargs: Any = None) -> None:
        """Update the parameters if this microbatch is the last of a step. Collective.

        Args:
            lr_kwargs: Only None.
        """
        if lr_kwargs:
            raise refusal("engine.step has no lr_kwargs; step your scheduler yourself")
        self._before = self._engine.skipped
        self._steps_before = self._engine.steps
        several, self._backwards = self._backwards > 1, 0
        if self._engine.step():
            self._engine.defers = several
            self._finish_step()

    def _finish_step(self, loss: float | None = None) -> None:
        self._engine.show_next_rate()
        every = self._values.get("steps_per_print")
        if isinstance(every, (int, float)) and every >= 1 and self.global_steps % int(every) == 0:
            shown = "" if loss is None else f", loss {loss:.4f}"
            if self.global_rank == 0:
                print(f"step {self.global_steps}{shown}, skipped {self.skipped_steps}, lr {self.get_lr()}", flush=True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the first backward pass of a step resets the gradients."""

    # -- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write a checkpoint into save_dir/tag, and the tag into save_dir/latest. Collective.

        Args:
            save_dir: Folder of the checkpoints; rank 0's counts.
            tag: Name of the checkpoint; None for global_step and the number of steps.
            client_state: Values that `load_checkpoint` returns, representable as JSON.
            save_latest: If false, the file `latest` is not written.
            exclude_frozen_parameters: Only False.
        """
        if exclude_frozen_parameters:
            raise refusal("save_checkpoint has no exclude_frozen_parameters; save engine.module_state_dict() yourself")
        try:
            json.dumps(client_state := dict(client_state or {}))
        except (TypeError, ValueError) as error:
            raise refusal(f"client_state cannot be written as JSON ({error}); pass plain values") from None
        tag, world = str(tag) if tag is not None else f"global_step{self.global_steps}", self._engine.mesh.world
        folder = Path(world.broadcast_object(str(save_dir)))  # scripts put the time of day into the name
        self._engine.save(folder / tag, client_state)
        if save_latest and self.global_rank == 0:
            write_whole(folder / LATEST, tag)
        world.barrier()
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint, saved at any ZeRO stage and number of ranks. Collective.

        Args:
            load_dir: Folder of the checkpoints; rank 0's counts.
            tag: Name of the checkpoint; None for that in the file `latest`.
            load_module_strict, load_optimizer_states, load_lr_scheduler_states: Only True.
            load_module_only: Only False.
            custom_load_fn: Only None.

        Returns:
            Path and `client_state` of the checkpoint; (None, None) if there is no tag and no file `latest`.
        """
        partly = load_module_only or custom_load_fn is not None
        if partly or not (load_module_strict and load_optimizer_states and load_lr_scheduler_states):
            raise refusal(
                "load_checkpoint loads everything; to load weights alone, run python -m mpitrain.checkpoint export "
                "CHECKPOINT weights.pt, and load that file into the model before deepspeed.initialize"
            )
        latest, name = Path(load_dir) / LATEST, tag
        if tag is None and self.global_rank == 0 and latest.is_file():
            name = latest.read_text().strip()
        where, name = self._engine.mesh.world.broadcast_object([str(load_dir), name])
        if name is None:
            return None, None
        folder = Path(where) / str(name)
        values = self._engine.load(folder)
        self._engine.show_next_rate()
        return str(folder), values

    def module_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole model's state on every rank. Collective."""
        return self._engine.state_dict()

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """Write the whole model's state into a file that torch.load reads. Collective.

        Args:
            save_dir: Folder, which is made if it is missing.
            save_filename: Name of the file.
        """
        state = self.module_state_dict()
        if self.global_rank == 0:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(save_dir) / save_filename)
        self._engine.mesh.world.barrier()
        return True

    save_fp16_model = save_16bit_model

    # -- data

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a DataLoader of this rank's samples.

        Args:
            dataset: Data set with a length.
            batch_size: Samples of a batch; None for those of a microbatch.
            route: "train", "eval" or "predict"; only "train" shuffles.
            pin_memory: Ignored; the engine copies batches to the device.
            data_sampler: Sampler; None to divide the samples among the ranks.
            collate_fn: Function that makes a batch from samples; None for that of `initialize`.
            num_local_io_workers: Ignored: a process that runs MPI must not be forked.
        """
        engine, shuffle = self._engine, self.shuffles and route == "train"
        return DataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=data_sampler or DistributedSampler(dataset, engine.data_size, engine.data_rank, shuffle),
            collate_fn=collate_fn or self._collate_fn,
            drop_last=bool(self._values.get("dataloader_drop_last", False)),
        )

    # -- what scripts ask for

    @property
    def global_steps(self) -> int:
        """Number of updates, including skipped ones."""
        return self._engine.steps

    @property
    def skipped_steps(self) -> int:
        """Number of updates that were skipped because a gradient was not finite."""
        return self._engine.skipped

    @property
    def micro_steps(self) -> int:
        """Number of microbatches of this rank so far."""
        return self._engine.steps * self.gradient_accumulation_steps() + self._engine.microbatches_done

    @property
    def global_samples(self) -> int:
        """Number of samples of all ranks that are in updates so far."""
        return self.global_steps * self.train_batch_size()

    @property
    def config(self) -> Mapping[str, Any]:
        """Values of the configuration."""
        return self._values

    @property
    def cur_scale(self) -> float:
        """Factor of the loss in fp16; 1 otherwise."""
        return self._engine.loss_scale

    def train_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._engine.settings.microbatch

    def gradient_accumulation_steps(self) -> int:
        return self._engine.settings.accumulate

    def is_gradient_accumulation_boundary(self) -> bool:
        return self._engine.at_boundary

    def was_step_applied(self) -> bool:
        """Return whether the last `step` changed the parameters."""
        return self._engine.steps > self._steps_before and self._engine.skipped == self._before

    def gradient_clipping(self) -> float:
        return self._engine.settings.config.train.clip

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return int(self._engine.settings.config.parallel.zero)

    def fp16_enabled(self) -> bool:
        return self._engine.settings.config.train.precision == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._engine.settings.config.train.precision == "bf16"

    def get_lr(self) -> list[float]:
        """Return the learning rate of the next update, of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float:
        """Return the 2-norm of the last step's gradients, before clipping."""
        return self._engine.norm

    def loss_scale(self) -> float:
        return self._engine.loss_scale


class DeepSpeedPipelineEngine(DeepSpeedEngine):
    """Engine of a `PipelineModule`; `train_batch` and `eval_batch` replace forward, backward and step."""

    shuffles = False

    def __init__(self, engine: TrainingEngine, values: Mapping[str, Any], training_data: Any, collate_fn: Any) -> None:
        super().__init__(engine, values, training_data, collate_fn)
        engine.defers = False
        if isinstance(engine, PipelineEngine):
            engine.evaluate_whole_batches()
        self._batches: Iterator[Any] | None = None
        if self.training_dataloader is not None:
            self.set_dataloader(RepeatingLoader(self.training_dataloader))

    def set_dataloader(self, loader: Any) -> None:
        """Use the batches of a loader in `train_batch`."""
        self.training_dataloader, self._batches = loader, iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Use the batches of an iterator in `train_batch`."""
        self.training_dataloader, self._batches = None, iterator

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Take a step on the next microbatches (inputs, targets). Collective.

        Args:
            data_iter: Iterator over microbatches; None for the training data of `initialize`.

        Returns:
            Mean loss over microbatches and data-parallel ranks, a scalar, on every rank.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        if self._batches is None:
            raise refusal("train_batch has no data; pass an iterator, or training_data= to deepspeed.initialize")
        self.module.train()
        loss = self._engine.train_batch(self._batches)
        self._finish_step(loss)
        return torch.tensor(loss, device=self.device)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> torch.Tensor:
        """Return the mean loss of the next microbatches (inputs, targets) without training, on every rank. Collective.

        Args:
            data_iter: Iterator over microbatches.
            return_logits: Only False.
            compute_loss: Only True.
            reduce_output: Only "avg".
            bcast_loss: Ignored: every rank gets the loss.
            num_micro_batches: Number of microbatches; None for those of a training step.
        """
        if return_logits or not compute_loss or reduce_output != "avg":
            raise refusal("eval_batch returns the mean loss alone; for outputs, use python -m mpitrain.predict")
        count = num_micro_batches or self.gradient_accumulation_steps()
        batches: Sequence[Any] = [*islice(data_iter, count)]
        return torch.tensor(self._engine.evaluate(batches), device=self.device)

    def is_first_stage(self) -> bool:
        return self._engine.is_first_stage

    def is_last_stage(self) -> bool:
        return self._engine.is_last_stage

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Raise InputError: `train_batch` and `eval_batch` compute all microbatches of a step."""
        raise refusal("an engine of a PipelineModule has no forward, backward and step; use train_batch and eval_batch")

    backward = step = forward
