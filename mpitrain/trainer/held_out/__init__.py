"""Figures of held-out samples, and the decisions that follow from them."""
