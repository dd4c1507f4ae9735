"""Shared by all benchmarks: starting ranks, writing reports, peers and training runs."""
