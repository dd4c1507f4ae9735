"""Which layout of a training job is fastest on a machine, and what it takes, before the job is started. Loads no MPI.

candidates             all layouts that the runtime takes: what the axes of `parallel` offer
machine                a machine's speeds and sizes; `machine.toml`, read, merged, written; machines/: some are given
subject, profile       what each block of a model costs; the model as one rank has it, divided without the others
counted                sizes and operations of blocks, from passes without values, and seconds reckoned from them
measured               seconds of blocks, measured in processes side by side
collectives            seconds of the collective that would run, simulated; between devices, in closed form
predictor              everything of a layout; seconds of a step, simulated: blocks, messages, buckets, update
refine                 the variants of a layout: which blocks a stage gets, which layers are divided
bounds                 what a layout takes at least, and a guess, in microseconds
search                 the best layouts of all, or of those that keep what a configuration says explicitly
report                 what a plan says; how the best layouts go with the number of ranks
"""
