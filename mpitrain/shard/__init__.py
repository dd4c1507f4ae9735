"""Data parallelism: which rank keeps which parameters, gradients and optimizer states, and how they meet."""
