"""Code shared by all benchmarks: start of ranks, reports, peers and training runs."""
