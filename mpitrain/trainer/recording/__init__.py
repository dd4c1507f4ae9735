"""Callbacks that report on a run: console output, metrics, events, records of ranks, and timelines."""
