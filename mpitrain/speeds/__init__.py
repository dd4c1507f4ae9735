"""Speeds of this machine, measured by all ranks of a job, for the planner's machine profile.

cores      speeds of one core while all cores are busy, and of an accelerator
links      speeds of messages, copies and sums between ranks
kept       the measurements as values of machine.toml, and the stored profile of this kind of machine
timing     times of collective operations
"""
