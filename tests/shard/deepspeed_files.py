"""DeepSpeed configuration files of public repositories, with the settings that each requests.

    name: (the file's keys, our settings in place of "auto", the settings that are read)

Names describe where such files are found. Values that have no effect here differ from the originals.
"""

AUTO = "auto"
_ADAMW = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
_WARMUP = {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), AUTO)}
_BATCH = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), AUTO)
_SCALING = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
_STAGE3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO, "stage3_param_persistence_threshold": AUTO,
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
}  # fmt: skip
_ON_CPU = {"device": "cpu", "pin_memory": True}
_OURS = {"train": {"batch": 48, "microbatch": 4, "steps": 90, "clip": 0.5, "precision": "bf16"}}
_OURS |= {"optim": {"lr": 3e-4, "warmup": 9, "weight_decay": 0.02, "options": {"betas": [0.8, 0.9]}}}

FILES = {
    "a fine-tuning suite, ZeRO-0": (
        {**_BATCH, "gradient_clipping": AUTO, "zero_allow_untested_optimizer": True,
         "fp16": {"enabled": AUTO, **_SCALING}, "bf16": {"enabled": AUTO},
         "zero_optimization": {"stage": 0, "allgather_partitions": True, "overlap_comm": False,
                               "reduce_bucket_size": 5e8, "round_robin_gradients": True}},
        _OURS,
        {"zero": 0, "microbatch": 4, "accumulate": 6, "clip": 0.5, "precision": "bf16"},
    ),
    "a fine-tuning suite, ZeRO-3 with parameters on the host": (
        {**_BATCH, "gradient_clipping": AUTO, "zero_allow_untested_optimizer": True,
         "fp16": {"enabled": AUTO, **_SCALING}, "bf16": {"enabled": AUTO},
         "zero_optimization": {**_STAGE3, "offload_optimizer": _ON_CPU, "offload_param": _ON_CPU,
                               "stage3_gather_16bit_weights_on_model_save": True},
         "comms_config": {"verbose": False},
         "monitor_config": {"enabled": True, "tag": "x", "csv_monitor": {"enabled": False}}},
        _OURS,
        {"zero": 3, "offload": "host", "offload_parameters": "host", "any_optimizer": True, "accumulate": 6},
    ),
    "a vision and language model, ZeRO-3 offload": (
        {"fp16": {"enabled": AUTO, **_SCALING}, "bf16": {"enabled": True}, "optimizer": _ADAMW, "scheduler": _WARMUP,
         "zero_optimization": {**_STAGE3, "offload_optimizer": _ON_CPU, "offload_param": _ON_CPU,
                               "gather_16bit_weights_on_model_save": True},
         **_BATCH, "gradient_clipping": AUTO, "steps_per_print": 1e5, "wall_clock_breakdown": False},
        _OURS,
        {"optimizer": ("AdamW", {"lr": 3e-4, "betas": [0.8, 0.9], "weight_decay": 0.02}), "precision": "bf16",
         "rates": {0: 0.0, 1: 0.0, 3: 1.5e-4, 9: 3e-4, 80: 3e-4}},
    ),
    "a mixture of experts, ZeRO-3 without an optimizer": (
        {"fp16": {"enabled": AUTO, **_SCALING, "loss_scale_window": 100}, "bf16": {"enabled": AUTO}, **_BATCH,
         "zero_optimization": {**_STAGE3, "stage3_gather_16bit_weights_on_model_save": True}},
        {"train": {"precision": "fp16"}},
        {"zero": 3, "precision": "fp16", "optimizer": None, "microbatch": 0, "accumulate": 1},
    ),
    "the tests of a library of models, ZeRO-3": (
        {"fp16": {"enabled": True, **_SCALING},
         "zero_optimization": {**_STAGE3, "sub_group_size": 1e14, "reduce_bucket_size": 0,
                               "offload_optimizer": _ON_CPU, "offload_param": _ON_CPU,
                               "stage3_gather_fp16_weights_on_model_save": True},
         "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8,
                                                   "weight_decay": 3e-7}},
         "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5,
                                                      "warmup_num_steps": 500}},
         "steps_per_print": 2000, "wall_clock_breakdown": False},
        {},
        {"bucket_mb": 1.0, "offload_parameters": "host", "rates": {500: 3e-5}},
    ),
    "Megatron with ZeRO-Infinity, and a key that is misspelled": (
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "steps_per_print": 1,
         "zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1e5, "reduce_bucket_size": 90000000,
                               "offload_optimizer": {"device": "nvme", "nvme_path": "/disk/a", "buffer_count": 4,
                                                     "pipeline_read": False, "pipeline_write": False},
                               "offload_param": {"device": "nvme", "nvme_path": "/disk/b", "max_in_cpu": 1}},
         "gradient_clipping": 1.0, "fp16": {"enabled": True, **_SCALING, "loss_scale": 1024},
         "wall_clock_breakdown": True, "zero_allow_untested_optimizer": False,
         "aio": {"block_size": 1048576, "queue_depth": 16}},
        {},
        {"offload": "/disk/a", "offload_parameters": "/disk/b", "microbatch": 4},
    ),
    "the first examples: images, states on the host as it was written then": (
        {"train_batch_size": 4, "steps_per_print": 2000, "gradient_clipping": 1.0, "prescale_gradients": False,
         "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8}},
         "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001,
                                                      "warmup_num_steps": 1000}},
         "fp16": {"enabled": True, "fp16_master_weights_and_grads": True, **_SCALING}, "wall_clock_breakdown": False,
         "zero_optimization": {"stage": 2, "allgather_partitions": True, "cpu_offload": True}},
        {},
        {"zero": 2, "offload": "host", "microbatch": 2},
    ),
    "the first examples: Megatron, activations recomputed": (
        {"train_batch_size": 16, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2},
         "optimizer": {"type": "Adam", "params": {"lr": 0.00015}}, "fp16": {"enabled": True},
         "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": False,
                                      "cpu_checkpointing": True, "number_checkpoints": 4, "profile": True,
                                      "synchronize_checkpoint_boundary": True}},
        {},
        {"recompute": True, "offload_activations": "host", "microbatch": 8, "optimizer": ("AdamW", {"lr": 0.00015})},
    ),
    "an autotuner's template": (
        {"train_micro_batch_size_per_gpu": AUTO, "zero_optimization": {"stage": 3}, "fp16": {"enabled": True}},
        {"train": {"microbatch": 3}},
        {"microbatch": 3, "accumulate": 1, "precision": "fp16"},
    ),
    "reinforcement learning: parameters on the host at stage 2, where nobody looks at it": (
        {"gradient_clipping": 1.0, "gradient_accumulation_steps": 1, "train_batch_size": AUTO,
         "train_micro_batch_size_per_gpu": AUTO, "fp16": {"enabled": False}, "bf16": {"enabled": False},
         "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"},
                               "allgather_bucket_size": 5e8}},
        {"train": {"batch": 10}},
        {"offload": "host", "offload_parameters": "", "microbatch": 5},
    ),
    "a computing centre's course": (
        {"train_batch_size": 400, "steps_per_print": 2000, "gradient_clipping": 1.0, "prescale_gradients": False,
         "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8}},
         "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001,
                                                      "warmup_num_steps": 1000}}, "wall_clock_breakdown": False},
        {},
        {"zero": 0, "microbatch": 200, "rates": {1000: 0.001}},
    ),
    "adapters of a chat model: keys of fp16 in bf16, every size auto": (
        {"fp16": {"enabled": False, **_SCALING}, "bf16": {"enabled": True, **_SCALING},
         "optimizer": {"type": "AdamW", "params": {"lr": AUTO, "weight_decay": AUTO, "torch_adam": True,
                                                   "adam_w_mode": True}},
         "scheduler": {"type": "WarmupDecayLR",
                       "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO,
                                  "total_num_steps": AUTO}},
         "zero_optimization": {"stage": 2, "reduce_bucket_size": AUTO}, "gradient_accumulation_steps": 1,
         "gradient_clipping": 1, "train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO},
        {"train": {"batch": 8, "steps": 30}, "optim": {"lr": 1e-3, "warmup": 10}},
        {"microbatch": 4, "rates": {10: 1e-3, 21: 5e-4, 31: 0.0}},
    ),
    "a project's own keys beside DeepSpeed's": (
        {"train_batch_size": 160, "gradient_accumulation_steps": 5, "train_micro_batch_size_per_gpu": 16,
         "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
         "scheduler": {"type": "WarmupDecayLR",
                       "params": {"last_batch_iteration": -1, "total_num_steps": 80000, "warmup_min_lr": 0,
                                  "warmup_max_lr": 1e-4, "warmup_num_steps": 4000}},
         "bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7},
         "logging": {"level": "warning"}, "dataloader_settings": {"num_workers": 4},
         "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False,
                                      "number_checkpoints": 1}, "communication_data_type": "bf16"},
        {},
        {"reduce_dtype": "bf16", "recompute": True, "accumulate": 5},
    ),
    "before there was a section of ZeRO, and a schedule of torch": (
        {"train_batch_size": 4, "fp16": {"enabled": True}, "zero_optimization": False,
         "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
         "scheduler": {"type": "CosineAnnealingLR", "params": {"eta_min": 1e-5, "T_max": 500}}},
        {},
        {"zero": 0, "torch_schedule": ("CosineAnnealingLR", {"eta_min": 1e-5, "T_max": 500}),
         "optimizer": ("SGD", {"lr": 0.1, "momentum": 0.9})},
    ),
    "question answering with one cycle, whose stairs are longer than its second half has steps": (
        {"train_batch_size": 512, "train_micro_batch_size_per_gpu": 32, "steps_per_print": 10,
         "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8,
                                                  "weight_decay": 3e-7}},
         "scheduler": {"type": "OneCycle",
                       "params": {"cycle_min_lr": 0.002, "cycle_max_lr": 0.012, "cycle_first_step_size": 100,
                                  "cycle_second_step_size": 10, "cycle_first_stair_count": 20,
                                  "cycle_second_stair_count": 20, "decay_step_size": 100, "decay_lr_rate": 0.01}}},
        {},
        {"accumulate": 8, "rates": {0: 0.002, 4: 0.002, 5: 0.0025, 100: 0.012, 105: 0.007, 110: 0.002,
                                    210: 0.002 / 1.01}, "momenta": {0: 0.8, 1: 0.9, 100: 0.8, 105: 0.85, 500: 0.9}},
    ),
    "distillation: which learning rate it bears, and each monitor": (
        {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
         "scheduler": {"type": "LRRangeTest",
                       "params": {"lr_range_test_min_lr": 4e-6, "lr_range_test_step_size": 1,
                                  "lr_range_test_step_rate": 25, "lr_range_test_staircase": False}},
         "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "x"}, "comet": {"enabled": False},
         "wandb": {"enabled": True, "team": "a", "group": "b", "project": "c"},
         "csv_monitor": {"enabled": True, "output_path": "csv/", "job_name": "x"}},
        {},
        {"rates": {0: 4e-6, 4: 4e-6 * 101}, "trackers": ("tensorboard", "wandb", "csv_monitor")},
    ),
    "BERT as its authors trained it": (
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "steps_per_print": 10,
         "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "weight_decay": 0.0, "bias_correction": False}},
         "gradient_clipping": 1.0, "zero_optimization": {"stage": 1}, "fp16": {"enabled": True}},
        {},
        {"accumulate": 4, "optimizer": ("UncorrectedAdamW", {"lr": 3e-5, "weight_decay": 0.0})},
    ),
    "BERT in large batches": (
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": True, "loss_scale": 0},
         "optimizer": {"type": "Lamb", "params": {"lr": 0.011, "weight_decay": 0.01, "bias_correction": False,
                                                  "max_coeff": 0.3}},
         "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True},
        {},
        {"optimizer": ("lamb", {"lr": 0.011, "weight_decay": 0.01, "eps": 1e-8, "least": 0.01, "most": 0.3,
                                "correct": False})},
    ),
    "steps in the direction of signs, and what bf16 was called before": (
        {"train_batch_size": 8, "gradient_accumulation_steps": 2, "bfloat16": {"enabled": True},
         "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.1}},
         "zero_optimization": {"stage": 3}, "checkpoint": {"tag_validation": "WARN", "load_universal": False},
         "sequence_parallel_size": 1},
        {},
        {"precision": "bf16", "optimizer": ("Lion", {"lr": 1e-4, "betas": [0.9, 0.99], "weight_decay": 0.1})},
    ),
}  # fmt: skip

# the same of further files, which are only read: their training is that of others
READ = {
    "images in 16 bits": (
        {"train_batch_size": 256, "gradient_accumulation_steps": 1, "steps_per_print": 50, "cuda_visible_devices": 0,
         "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8}},
         "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "gradient_clipping": 0,
         "fp16": {"enabled": True, "auto_cast": True}, "prescale_gradients": False, "wall_clock_breakdown": False},
        {},
        {"clip": 0.0, "precision": "fp16", "zero": 1},
    ),
    "adapters, whose model torch compiles": (
        {**_BATCH, "zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": AUTO},
         "fp16": {"enabled": AUTO, "auto_cast": False, **_SCALING}, "gradient_clipping": AUTO,
         "compile": {"disable": False, "backend": "inductor"}, "wall_clock_breakdown": False},
        _OURS,
        {"precision": "bf16", "accumulate": 6},
    ),
    "summaries by reinforcement learning, with keys of Apex": (
        {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
         "fp16": {"enabled": True, "min_loss_scale": 0.5, "fp16_scale_tolerance": 0.25, "opt_level": "O2"},
         "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"},
                               "allgather_partitions": True, "contiguous_gradients": True}},
        {},
        {"offload": "host", "offload_parameters": "", "accumulate": 4},
    ),
    "the guide of a library of models: mixed precision by Apex, where it is wanted": (
        {**_BATCH, "amp": {"enabled": AUTO, "opt_level": AUTO}, "zero_optimization": {"stage": 2},
         "fp16": {"enabled": AUTO, "loss_scale": AUTO, "initial_scale_power": AUTO}},
        {"train": {"precision": "fp16"}},
        {"precision": "fp16"},
    ),
    "a mixture of experts on images and text": (
        {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, "steps_per_print": 10,
         "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}, "pipeline": {"use_reentrant": False},
         "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_min_ratio": 0.1,
                                                            "warmup_num_steps": 10, "warmup_type": "linear"}},
         "csv_monitor": {"enabled": True, "output_path": "here", "job_name": "x"}},
        {},
        {"trackers": ("csv_monitor",), "rates": {0: 0.0, 1: 1e-4, 10: 9.1e-4, 55: 1e-3 * (1 + 1e-4) / 2, 100: 1e-7}},
    ),
    "generation: a section that is off, gradients summed in fp32": (
        {"fp16": {"enabled": True}, "tensor_parallel": {"enabled": False}, "enable_cuda_graph": False,
         "zero_optimization": {"stage": 3, "offload_param": {"device": "none", "pin_memory": False}},
         "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "fp32_allreduce": True},
        {},
        {"reduce_dtype": "fp32", "offload_parameters": ""},
    ),
    "stocks: ZeRO switched on, a batch that nobody names": (
        {"gradient_accumulation_steps": 1, "optimizer": {"type": "Adagrad", "params": {"lr": 0.001, "eps": 1e-8}},
         "comms_logger": {"enabled": False, "verbose": False}, "zero_optimization": True, "steps_per_print": 250,
         "scheduler": {"type": None, "params": {}}},
        {},
        {"zero": 1, "optimizer": ("Adagrad", {"lr": 0.001, "eps": 1e-8}), "schedule": None},
    ),
}  # fmt: skip

# files with unsupported keys, each with the expected messages
REFUSED = {
    "a language model, gradients in one bit": (
        {"train_batch_size": 1280, "gradient_accumulation_steps": 80, "tensorboard": {"enabled": True},
         "optimizer": {"type": "OneBitAdam", "params": {"lr": 2e-4, "freeze_step": 2, "cuda-aware": True}},
         "fp16": {"enabled": True}, "zero_optimization": {"stage": 2, "cpu_offload": True}},
        ['optimizer.type OneBitAdam has no counterpart here; use "AdamW"'],
    ),
    "BERT in large batches, rates by layer in one bit": (
        {"train_batch_size": 65536, "train_micro_batch_size_per_gpu": 64, "fp16": {"enabled": True, "loss_scale": 0},
         "optimizer": {"type": "OneBitLamb", "params": {"lr": 0.011, "max_coeff": 0.3, "freeze_step": 1000}},
         "sparse_attention": {"mode": "fixed", "block": 16}},
        ['optimizer.type OneBitLamb has no counterpart here (use "Lamb"', "sparse_attention has no counterpart here"],
    ),
    "LAMB whose ratios and options are none": (
        {"train_batch_size": 4,
         "optimizer": {"type": "Lamb", "params": {"eps_inside_sqrt": True, "min_coeff": 2, "max_coeff": 1}}},
        ["optimizer.params.eps_inside_sqrt has no counterpart here",
         "min_coeff 2 and max_coeff 1 are not a range of numbers of at least 0 (set min_coeff to the smaller one)"],
    ),
    "a search for the layout": (
        {"train_micro_batch_size_per_gpu": AUTO, "autotuning": {"enabled": True, "fast": False}},
        ["autotuning has no counterpart here; remove it; python -m mpitrain.plan"],
    ),
    "shares within nodes, in few bits": (
        {"train_batch_size": 4, "bf16": {"enabled": True}, "sequence_parallel_size": 4,
         "zero_optimization": {"stage": 3, "mics_shard_size": 8, "mics_hierarchical_params_gather": True,
                               "zero_quantized_weights": True, "zero_hpz_partition_size": 8}},
        ['mics_shard_size has no counterpart here (remove it, or use an mpitrain configuration with '
         'parallel.shard_within = "node")', "zero_quantized_weights has no counterpart here (remove it, or set comm",
         "zero_hpz_partition_size has", "mics_hierarchical_params_gather has", "sequence_parallel_size has"],
    ),
    "a rate that follows the loss, momentum and correction at odds": (
        {"train_batch_size": 4, "scheduler": {"type": "ReduceLROnPlateau", "params": {"patience": 2}},
         "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "bias_correction": False, "amsgrad": True,
                                                   "momentum": 0.9}}},
        ["scheduler.type ReduceLROnPlateau needs held-out losses", "optimizer.params.momentum has no counterpart",
         "optimizer.params.amsgrad cannot be combined with bias_correction false"],
    ),
}  # fmt: skip
