"""Data parallelism and ZeRO: placement and movement of parameters, gradients and optimizer states.

sharding                        combines the parts below for one stage of ZeRO
placement                       the stages of ZeRO, and a formula for the memory of each
flat                            parameters laid end to end in buckets, or in units that are gathered together
parameters                      the placements of parameters
gradients, reducer, in_place    the placements of gradients, and how backward fills and reduces them
flat_parameters, update, offload
                                the tensors that this rank's optimizer updates, and where its states are
optimizers                      Muon, LAMB and LARS, which need whole parameters
virtual_workers                 the parts that a global batch is always divided into
ddp                             DistributedDataParallel, the replicated case alone
"""
