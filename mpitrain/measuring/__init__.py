"""Measurements for users on their own cluster: correctness and speed of collectives, and a machine profile.

self_start   starts the command itself under mpirun, once for each number of ranks
check        checks the results of every collective: `mpitrain.doctor --check`
tune         finds the fastest algorithm of each collective at each size: `mpitrain.doctor --tune`
installation reports on the MPI installation and the nodes: `mpitrain.doctor`; `findings` are its lines
machine      measures speeds and sizes for the planner: `mpitrain.plan --measure`
"""
