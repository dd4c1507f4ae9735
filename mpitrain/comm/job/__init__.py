"""The job, seen by one of its processes: how MPI starts and ends, who is where, what a failure ends, what is left."""
