"""The axes along which a training is spread over ranks, one file each, and the rules that they share.

data, pipeline, tensor an axis: what it refuses, how it divides a model, what it offers a planner, what that costs
rules                  what goes together, for jobs, loops of the user's and the planner
dividing               from a whole model to a rank's part of it, axis by axis
layouts                a layout: how a model is spread over ranks, as a line of text and as settings
costs                  what a model costs one rank, block by block
places                 where the ranks of a layout are, and which of them communicate with each other
memory                 what each rank has of a model, and its bytes by category
"""
