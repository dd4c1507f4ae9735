"""Layers that PyTorch lacks, or has in a form that does not go with distributed training."""
