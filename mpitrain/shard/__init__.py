"""Data parallelism and ZeRO: which rank keeps which parameters, gradients and optimizer states, and how they move.

sharding                        puts the rest together for a stage of ZeRO
placement                       the stages, and what each takes by formula
flat                            parameters end to end in buckets, or in the units that are gathered together
parameters                      the placements of parameters
gradients, reducer, in_place    the placements of gradients, and how backward fills and reduces them
flat_parameters, update, offload
                                what this rank's optimizer updates, and where its states are
virtual_workers                 the parts that a global batch is always divided into
ddp                             DistributedDataParallel, the replicated case by itself
"""
