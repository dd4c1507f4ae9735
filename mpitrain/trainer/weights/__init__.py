"""Weights of other programs into a run, and those of a run out."""
