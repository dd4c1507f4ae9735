"""Layers that PyTorch lacks, or whose PyTorch version does not work in distributed training."""
