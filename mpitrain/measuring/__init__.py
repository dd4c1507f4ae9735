"""What a user measures on their own cluster: whether collectives work, which algorithm is fastest, a machine's profile.

self_start   the command starts itself under mpirun, once for each number of ranks
check        whether every collective gives what it should: `mpitrain.doctor --check`
tune         the fastest algorithm of each collective at each size: `mpitrain.doctor --tune`
machine      speeds and sizes for the planner: `mpitrain.plan --measure`
"""
