"""A training step beside torch DDP, FSDP2 and DeepSpeed."""
