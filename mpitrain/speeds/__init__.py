"""How fast this machine is, measured by the ranks of a job together: the figures of the planner's machine profile.

cores      what one core does while all do the same, and what an accelerator does
links      messages, copies and sums of ranks
kept       all of it as values of machine.toml, and the profile of this kind of machine, kept for jobs to come
timing     times of operations that ranks make together
"""
