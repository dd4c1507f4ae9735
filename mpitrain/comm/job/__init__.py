"""The job, from the view of one process: start and end of MPI, placement of ranks, failures, and cleaning up."""
