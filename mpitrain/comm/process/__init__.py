"""A process in its job: how MPI starts and ends, who is where, how a failure ends all ranks, what is left behind."""
