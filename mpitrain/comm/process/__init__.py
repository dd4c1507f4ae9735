"""A process' place in the job: how MPI starts and ends, who is where, what is left behind."""
