"""A run while it goes on, read from its files (`python -m mpitrain.report --watch RUN`)."""
