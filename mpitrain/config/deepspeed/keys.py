"""The keys of a DeepSpeed configuration, sorted by how they are treated, and a collector of errors in one.

Reference:
    The "DeepSpeed Configuration JSON" page of DeepSpeed's documentation.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import InputError, refusal

MONITORS = {  # DeepSpeed's monitors and their replacements in our settings
    "tensorboard": "monitor.tensorboard = true",
    "wandb": "monitor.wandb = true",
    "comet": "monitor.tracker with a class of your own",
    "csv_monitor": "metrics.jsonl of every run",
}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MANAGED = "managed_gradient_accumulation"  # if true, DeepSpeed's step() counts microbatches, as ours does


@dataclass(frozen=True)
class Keys:
    """Valid keys of one section, sorted by how they are treated.

    Attributes:
        converted: Keys that are converted to our settings.
        harmless: Keys that are ignored, whatever their values: they tune DeepSpeed's own machinery, or only report.
        refused: Keys that are an error unless they are off; None, the default: all other keys.
    """

    converted: Collection[str]
    harmless: Collection[str] = ()
    refused: Collection[str] | None = None


def _keys(converted: str = "", harmless: str = "", refused: str | None = None) -> Keys:
    """Return `Keys` from texts that list the keys, separated by spaces."""
    return Keys(converted.split(), harmless.split(), None if refused is None else refused.split())


SCALING = "loss_scale initial_scale_power loss_scale_window min_loss_scale hysteresis consecutive_hysteresis"
_OFFLOAD = _keys(
    converted="device nvme_path",
    harmless="pin_memory buffer_count buffer_size fast_init pipeline pipeline_read pipeline_write max_in_cpu",
)
SECTIONS = {
    "": _keys(
        converted=f"""{" ".join((*BATCH, *MONITORS, MANAGED))} zero_optimization bf16 bfloat16 fp16 optimizer scheduler
            gradient_clipping activation_checkpointing communication_data_type data_types zero_allow_untested_optimizer
            fp32_allreduce checkpoint compile""",
        harmless="""steps_per_print wall_clock_breakdown dump_state prescale_gradients gradient_predivide_factor
            dataloader_drop_last disable_allgather memory_breakdown zero_force_ds_cpu_optimizer aio comms_logger
            flops_profiler disable_comm_overlap""",
        refused="""amp autotuning compression_training curriculum_learning sequence_parallel_size data_efficiency
            eigenvalue elasticity hybrid_engine nebula progressive_layer_drop quantize_training sparse_attention
            seq_parallel_communication_data_type sparse_gradients tensor_parallel torch_autocast
            use_data_before_expert_parallelism zenflow""",
    ),
    "zero_optimization": _keys(
        # cpu_offload...: names of the two sections of offload in DeepSpeed's first versions
        converted="""stage offload_optimizer offload_param reduce_bucket_size ignore_unused_parameters cpu_offload
            cpu_offload_params""",
        harmless="""allgather_partitions allgather_bucket_size contiguous_gradients load_from_fp32_weights
            log_trace_cache_warnings memory_efficient_linear overlap_comm reduce_scatter round_robin_gradients
            sub_group_size legacy_stage1 cpu_offload_use_pin_memory stage3_max_live_parameters
            stage3_max_reuse_distance stage3_module_granularity_threshold stage3_param_persistence_threshold
            stage3_model_persistence_threshold stage3_prefetch_bucket_size stage3_gather_16bit_weights_on_model_save
            stage3_gather_fp16_weights_on_model_save gather_16bit_weights_on_model_save
            gather_fp16_weights_on_model_save use_multi_rank_bucket_allreduce use_all_reduce_for_fetch_params""",
    ),
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "fp16": _keys(
        converted=f"enabled {SCALING}",
        # master weights stay fp32 here, and inputs always become 16-bit; DeepSpeed itself ignores the last three
        harmless="fp16_master_weights_and_grads auto_cast opt_level fp16_scale_tolerance scale_tolerance",
    ),
    "bf16": _keys(
        converted="enabled check_grad_overflow",
        harmless=f"immediate_grad_update bf16_master_weights_and_grads {SCALING}",
    ),
    "activation_checkpointing": _keys(
        converted="cpu_checkpointing",
        # no tensor ranks divide the activations, and the blocks that are recomputed follow from the model
        harmless="""number_checkpoints profile synchronize_checkpoint_boundary partition_activations
            contiguous_memory_optimization""",
    ),
    "data_types": _keys(converted="grad_accum_dtype"),
    "optimizer": _keys(converted="type params", harmless="legacy_fusion"),
    "scheduler": _keys(converted="type params"),
    # for DeepSpeed's own checkpoints, and for torch.compile if its engine calls that
    "checkpoint": _keys(harmless="tag_validation load_universal use_node_local_storage parallel_write writer"),
    "compile": _keys(harmless="disable backend kwargs offload_activation double_buffer symmetric_memory"),
}
# the value, besides false, that switches a key off
ONE_IS_OFF = {
    "zero_hpz_partition_size": 1,
    "mics_shard_size": -1,
    "ratio": 1.0,
    "last_batch_iteration": -1,
    "sequence_parallel_size": 1,
}
# the fix that the error for a refused key suggests; the default is to remove the key
_16_BIT = 'enable "bf16" or "fp16", which use autocast and fp32 master weights, or remove it'
_WITHIN_NODES = 'remove it, or use an mpitrain configuration with parallel.shard_within = "node"'
_FEWER_BYTES = (
    'remove it, or set communication_data_type "bf16"; an mpitrain configuration has comm.compression and '
    "comm.parameter_compression"
)
_ORDER = "remove it, and sort the samples in the order in which they must be trained"
INSTEAD = {
    "amp": f"Apex is not supported; {_16_BIT}",
    "torch_autocast": _16_BIT,
    "autotuning": "remove it; python -m mpitrain.plan finds the layout",
    "compile": "remove it; an mpitrain configuration has model.compile",
    "compression_training": "remove it, and compress the trained model with torch.ao or torch.nn.utils.prune",
    "curriculum_learning": _ORDER,
    "data_efficiency": _ORDER,
    "elasticity": 'remove it; mpitrain.train continues with fewer ranks if elastic.mode = "shrink"',
    "eigenvalue": "remove it",
    "hybrid_engine": "remove it, and generate with python -m mpitrain.generate",
    "nebula": "remove it; engine.save writes sharded checkpoints",
    "progressive_layer_drop": "remove it, and drop layers in the model",
    "quantize_training": "remove it, and quantize the trained model with torch.ao",
    "sparse_attention": "remove it, and mask the attention in the model",
    "sparse_gradients": "remove it; embeddings have dense gradients here",
    "sequence_parallel_size": "set it to 1; an mpitrain configuration has parallel.tensor with parallel.sequence",
    "tensor_parallel": "remove it; an mpitrain configuration has parallel.tensor",
    "zero_optimization.mics_shard_size": _WITHIN_NODES,
    "zero_optimization.mics_hierarchical_params_gather": _WITHIN_NODES,
    "zero_optimization.zero_hpz_partition_size": _WITHIN_NODES,
    "zero_optimization.zero_quantized_weights": _FEWER_BYTES,
    "zero_optimization.zero_quantized_nontrainable_weights": _FEWER_BYTES,
    "zero_optimization.zero_quantized_gradients": _FEWER_BYTES,
    "zero_optimization.ignore_unused_parameters false": "remove it; use every parameter in each pass, or freeze it",
    "zero_optimization.elastic_checkpoint": "remove it; any number of ranks can read a checkpoint",
}


_NEAR = 0.8  # least similarity of a misspelled key and the one that is meant
_MAX_COMPARED, _LONGEST = 1000, 100  # keys of a section, and characters of a key, that are compared with valid keys


def is_off(value: Any) -> bool:
    """Return True if the value of a key switches it off: it is false or empty, or a section that is not enabled."""
    return not value or (isinstance(value, Mapping) and value.get("enabled", True) in (False, None))


class Findings:
    """Collector of all errors in one DeepSpeed configuration, and of the keys that are ignored.

    Args:
        origin: Name of the configuration in error messages.

    Attributes:
        ignored: Keys of the configuration that have no effect, each with its section.
    """

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._errors: dict[str, str] = {}  # error -> fix
        self.ignored: list[str] = []

    def add_error(self, error: str, fix: str) -> None:
        """Record an error.

        Args:
            error: The error.
            fix: The fix, as an imperative.
        """
        self._errors[error] = fix

    def unsupported(self, key: str) -> None:
        """Record an error for a key that requests a feature without a counterpart in our settings."""
        self.add_error(
            f"{key} has no counterpart here", INSTEAD.get(key, INSTEAD.get(key.partition(".")[0], "remove it"))
        )

    def section(self, name: str, value: Any) -> Mapping[str, Any]:
        """Return a section as a mapping, empty if it is missing; record an error if it is anything else.

        Args:
            name: Name of the section, for the error.
            value: Value of the section in the configuration.
        """
        if value and not isinstance(value, Mapping):
            self.add_error(f"{name} {value!r:.80} is not a section", 'write {"key": value, ...}')
        return value if isinstance(value, Mapping) else {}

    def number(self, name: str, value: Any) -> float:
        """Return a finite number, which may be written as text; for anything else, record an error and return 0.

        Args:
            name: Name of the key, for the error.
            value: Value of the key.
        """
        try:
            if not isinstance(value, bool) and math.isfinite(number := float(value)):
                return number
        except (TypeError, ValueError, OverflowError):
            pass
        self.add_error(f"{name} {value!r:.80} is not a number", "give a number")
        return 0.0

    def integer(self, name: str, value: Any, least: int = 0) -> int:
        """Return an integer of at least `least`; for anything else, record an error and return `least`.

        Args:
            name: Name of the key, for the error.
            value: Value of the key; may be written as text or as a float such as 1e3.
            least: Smallest valid value, default 0.
        """
        number = self.number(name, value)
        if number == int(number) and least <= number < 2**53:
            return int(number)
        self.add_error(f"{name} {value!r:.80} is not an integer", f"give an integer of at least {least:,}")
        return least

    @contextmanager
    def recording_errors(self, where: str = "") -> Iterator[None]:
        """Record an InputError raised in the `with` block instead of raising it, with `where` before its message."""
        try:
            yield
        except InputError as error:
            problem, _, fix = str(error).partition("; ")
            self.add_error(where + problem, fix or "fix it")

    def check_section(self, section: Mapping[str, Any], name: str, keys: Keys | None = None) -> None:
        """Check the keys of a section: record unsupported and misspelled keys as errors, and list the ignored ones.

        Args:
            section: Values of the section.
            name: Name of the section, such as `zero_optimization`; empty for the whole configuration.
            keys: Valid keys of the section; None: `SECTIONS[name]`.
        """
        valid = keys or SECTIONS[name]
        converted, harmless, refused = valid.converted, valid.harmless, valid.refused
        name = f"{name}." if name else ""
        known = [*converted, *harmless, *(refused or ())]
        for number, key in enumerate(section):
            if key in converted:
                continue
            comparable = number < _MAX_COMPARED and key not in known
            off = is_off(section[key]) or section[key] == ONE_IS_OFF.get(key)
            unknown = refused is not None and key not in refused  # DeepSpeed ignores it, too
            meant = difflib.get_close_matches(key[:_LONGEST], known, n=1, cutoff=_NEAR) if comparable else []
            if meant and meant[0] not in harmless:
                self.add_error(f"{name}{key} is unknown", f"did you mean {meant[0]!r}?")
            elif key in harmless or meant or off or unknown:
                self.ignored.append(name + key)
            else:
                self.unsupported(name + key)

    def raise_errors(self) -> None:
        """Raise one InputError with all recorded errors, if there are any."""
        if len(self._errors) == 1:
            ((error, fix),) = self._errors.items()
            raise refusal(f"{self._origin}: {error}; {fix}")
        if self._errors:
            raise refusal(f"{self._origin}: " + "; ".join(f"{error} ({fix})" for error, fix in self._errors.items()))
