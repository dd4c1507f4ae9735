"""What a person sees of a run: banner, progress, metrics, logs, memory. Takes plain values and knows no MPI."""
