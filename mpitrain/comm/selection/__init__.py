"""Which algorithm serves an operation in a setting, and by which program. Loads no MPI: the planner asks, too."""
