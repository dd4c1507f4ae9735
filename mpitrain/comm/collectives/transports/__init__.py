"""Transports: the ways in which device memory is carried between ranks.

    staged   through pinned host memory shared by the node, with the programs for host memory; always possible
    mpi      by an MPI library that accepts addresses of device memory
    peer     by the ranks of one node that have mapped each other's device memory, with the programs for shared memory
    nccl     by NCCL or RCCL

Each is a `Transport`. The module `choice` finds out which are possible and which is fastest. All of them keep stream
order: the operation runs after the work that the calling thread queued on its current stream before the call, and
before the work that it queues there afterwards. The host does not wait for the latter.
"""
