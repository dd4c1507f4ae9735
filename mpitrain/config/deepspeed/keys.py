"""The keys of a DeepSpeed configuration, by what becomes of them."""

from __future__ import annotations

from mpitrain.choices import Precision

AUTO = "auto"
MONITORS = {  # what there is in a configuration of ours instead of each
    "tensorboard": "monitor.tensorboard = true",
    "wandb": "monitor.wandb = true",
    "comet": "monitor.tracker of your own",
    "csv_monitor": "metrics.jsonl of every run",
}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MANAGED = "managed_gradient_accumulation"  # step() counts microbatches, as ours does

# taken over
TAKEN = {*BATCH, "zero_optimization", "bf16", "fp16", "optimizer", "scheduler", "gradient_clipping", MANAGED}
TAKEN |= {"activation_checkpointing", "communication_data_type", "data_types", "zero_allow_untested_optimizer"}
TAKEN |= {"bfloat16", "fp32_allreduce", "checkpoint", "compile", *MONITORS}
ZERO_TAKEN = {"stage", "offload_optimizer", "offload_param", "reduce_bucket_size", "ignore_unused_parameters"}
ZERO_TAKEN |= {"cpu_offload", "cpu_offload_params"}  # what the two sections of offload were called before
FP16_TAKEN = {"enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale", "hysteresis"}
FP16_TAKEN.add("consecutive_hysteresis")

# without effect, whatever they say: they tune DeepSpeed's own machinery, or only report
HARMLESS = {"steps_per_print", "wall_clock_breakdown", "dump_state", "prescale_gradients", "gradient_predivide_factor"}
HARMLESS |= {"dataloader_drop_last", "disable_allgather", "memory_breakdown", "zero_force_ds_cpu_optimizer", "aio"}
HARMLESS |= {"comms_logger", "flops_profiler", "disable_comm_overlap"}
ZERO_HARMLESS = {"allgather_partitions", "allgather_bucket_size", "contiguous_gradients", "load_from_fp32_weights"}
ZERO_HARMLESS |= {"log_trace_cache_warnings", "memory_efficient_linear", "overlap_comm", "reduce_scatter"}
ZERO_HARMLESS |= {"round_robin_gradients", "sub_group_size", "legacy_stage1", "cpu_offload_use_pin_memory"}
ZERO_HARMLESS |= {"stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold"}
ZERO_HARMLESS |= {"stage3_param_persistence_threshold", "stage3_model_persistence_threshold"}
ZERO_HARMLESS |= {"stage3_prefetch_bucket_size", "stage3_gather_16bit_weights_on_model_save"}
ZERO_HARMLESS |= {"stage3_gather_fp16_weights_on_model_save", "gather_16bit_weights_on_model_save"}
ZERO_HARMLESS |= {
    "gather_fp16_weights_on_model_save",
    "use_multi_rank_bucket_allreduce",
    "use_all_reduce_for_fetch_params",
}
OFFLOAD_HARMLESS = {"pin_memory", "buffer_count", "buffer_size", "fast_init", "pipeline", "pipeline_read"}
OFFLOAD_HARMLESS |= {"pipeline_write", "max_in_cpu"}
FP16_HARMLESS = {"fp16_master_weights_and_grads"}  # ours stay fp32
FP16_HARMLESS.add("auto_cast")  # inputs always become 16-bit numbers here
FP16_HARMLESS |= {"opt_level", "fp16_scale_tolerance", "scale_tolerance"}  # DeepSpeed does not look at these
BF16_HARMLESS = {"immediate_grad_update", "bf16_master_weights_and_grads", *(FP16_TAKEN - {"enabled"})}
RECOMPUTE_HARMLESS = {"number_checkpoints", "profile", "synchronize_checkpoint_boundary", "partition_activations"}
RECOMPUTE_HARMLESS.add("contiguous_memory_optimization")
# of DeepSpeed's own checkpoints, and of torch.compile where its engine is told to call it
CHECKPOINT_HARMLESS = {"tag_validation", "load_universal", "use_node_local_storage", "parallel_write", "writer"}
COMPILE_HARMLESS = {"disable", "backend", "kwargs", "offload_activation", "double_buffer", "symmetric_memory"}

# refused, unless they are switched off
UNSUPPORTED = {"amp", "autotuning", "compression_training", "curriculum_learning", "sequence_parallel_size"}
UNSUPPORTED |= {"data_efficiency", "eigenvalue", "elasticity", "hybrid_engine", "nebula", "progressive_layer_drop"}
UNSUPPORTED |= {"quantize_training", "sparse_attention", "seq_parallel_communication_data_type", "sparse_gradients"}
UNSUPPORTED |= {"tensor_parallel", "torch_autocast", "use_data_before_expert_parallelism", "zenflow"}
ONE_IS_OFF = {"zero_hpz_partition_size": 1, "mics_shard_size": -1, "ratio": 1.0, "last_batch_iteration": -1}
ONE_IS_OFF |= {"sequence_parallel_size": 1}
# what to do instead of a key that is refused; of the others, to remove it
_16_BIT = 'enable "bf16" or "fp16", which have the passes autocast and masters in fp32, or remove it'
_WITHIN_NODES = 'remove it, or share inside nodes with a configuration of ours: parallel.shard_within = "node"'
_FEWER_BYTES = 'remove it, or set communication_data_type "bf16"; a configuration of ours has comm.compression'
_ORDER = "remove it, and put the samples into the order that they are to come in"
INSTEAD = {
    "amp": f"it is Apex, which is not used here; {_16_BIT}",
    "torch_autocast": _16_BIT,
    "autotuning": "remove it; python -m mpitrain.plan finds the layout",
    "compile": "remove it; a configuration of ours has model.compile",
    "compression_training": "remove it, and compress the trained model with torch.ao or torch.nn.utils.prune",
    "curriculum_learning": _ORDER,
    "data_efficiency": _ORDER,
    "elasticity": 'remove it; mpitrain.train goes on with fewer ranks by elastic.mode = "shrink"',
    "eigenvalue": "remove it",
    "hybrid_engine": "remove it, and generate with python -m mpitrain.generate",
    "nebula": "remove it; engine.save writes sharded checkpoints",
    "progressive_layer_drop": "remove it, and drop layers in the model",
    "quantize_training": "remove it, and quantize the trained model with torch.ao",
    "sparse_attention": "remove it, and have the model mask its attention",
    "sparse_gradients": "remove it; gradients of embeddings are dense here",
    "sequence_parallel_size": "set it to 1; a configuration of ours has parallel.tensor with parallel.sequence",
    "tensor_parallel": "remove it; a configuration of ours has parallel.tensor",
    "zero_optimization.mics_shard_size": _WITHIN_NODES,
    "zero_optimization.mics_hierarchical_params_gather": _WITHIN_NODES,
    "zero_optimization.zero_hpz_partition_size": _WITHIN_NODES,
    "zero_optimization.zero_quantized_weights": _FEWER_BYTES,
    "zero_optimization.zero_quantized_nontrainable_weights": _FEWER_BYTES,
    "zero_optimization.zero_quantized_gradients": _FEWER_BYTES,
    "zero_optimization.ignore_unused_parameters false": "remove it; use every parameter in each pass, or freeze it",
    "zero_optimization.elastic_checkpoint": "remove it; checkpoints are read by any number of ranks here",
    "activation_checkpointing.cpu_checkpointing": "remove it; activations are recomputed, and not kept on the host",
}

DTYPES: dict[str, Precision] = {"fp32": "fp32", "fp16": "fp16", "bfp16": "bf16", "bf16": "bf16"}
