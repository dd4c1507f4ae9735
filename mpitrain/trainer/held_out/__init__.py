"""Evaluation on held-out samples, and evaluation of checkpoints."""
