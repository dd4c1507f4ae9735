"""Which layout of a training job is fastest on a machine, and what it takes, before the job is started. Loads no MPI.

layouts                a layout: how a model is spread over ranks, in the settings that would run it
machine                a machine profile: speeds and sizes
machine_file, machine_keys, units
                       `machine.toml`: read, merged, written; its keys; "100 Gbit/s"; machines/: some that are given
model, profile         a model profile: what each block costs in time and memory
subject, dividing      the model as one rank has it, divided without the other ranks
alike                  blocks that do the same, of which one is observed
recorder, passes       sizes and operations of blocks, from passes without values
measured, counted      seconds of blocks, measured in processes side by side or reckoned from operations
collectives            seconds of the collective that would run, simulated
device_links           the same between devices, in closed form
memory                 bytes of a rank, by category
flow                   microbatches through a pipeline's stages: when ranks are done, what they hold
turns                  the same where ranks share cores
held, places           what each rank holds, and which ranks communicate with each other
predictor, step        everything of a layout; seconds of a step, simulated: blocks, messages, buckets, update
stages, parts          which blocks a pipeline stage gets; which layers are divided over tensor ranks
refine                 the variants of a layout that these two give
described              what the data of a configuration are
candidates             all layouts that the runtime takes
bounds                 what a layout takes at least, and a guess, in microseconds
search                 the best layouts of all
given                  the best layouts that keep what a configuration says explicitly
scaling                how the best layouts go with the number of ranks
notation, report       a layout as a line of text and as settings; what a plan says
restart                how often to write checkpoints
"""
