"""The ways in which the memory of devices is carried between ranks.

    staged   through pinned host memory that the node shares, with the programs for host memory; everywhere
    mpi      by an MPI library that takes addresses of device memory
    peer     by the ranks of a node that have mapped each other's device memory, with the programs for shared memory
    nccl     by NCCL or RCCL

Each is a `Transport`; `choice` finds out which are possible, and which is fastest. All keep one promise: the operation
comes after what the calling thread has asked of its current stream, and what it asks of that stream afterwards comes
after the operation. The host does not wait for the latter.
"""
