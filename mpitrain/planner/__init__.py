"""The planner: finds the fastest layout of a training job on a machine before the job starts. Does not load MPI.

candidates             every layout that the runtime accepts, from the options that the mesh axes offer
machine                speeds and sizes of a machine; reads, merges and writes `machine.toml`; machines/ has such files
subject, profile       cost of each block of a model; one process builds the part of the model that one rank has
counted                sizes and operations of blocks from passes without values, and seconds estimated from them
measured               measured seconds of blocks, with several processes computing side by side
collectives            seconds of collectives: simulated in host memory, in closed form between devices
predictor              memory of a layout, and simulated seconds of a step: blocks, messages, buckets, update
refine                 variants of a layout: which blocks each stage gets, which layers are divided
bounds                 lower bounds and estimates of a layout's seconds and bytes, computed in microseconds
search                 the best of all layouts, or of those that keep the explicit settings of a configuration
report                 a plan as text, and the scaling of the best layouts with the number of ranks
"""
