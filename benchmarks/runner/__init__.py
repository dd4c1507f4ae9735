"""What the benchmarks share: starting, reporting, peers, runs of training."""
