"""The axes along which training is spread over ranks, one file for each, and the rules that they share.

data, pipeline, tensor  an axis: invalid settings, division of the model, options for the planner and their costs
rules                   settings that exclude each other, for jobs, user loops and the planner
dividing                division of the whole model into one rank's part, axis by axis
layouts                 a layout (division of a model over ranks) as a line of text and as settings
costs                   cost of a model on one rank, block by block
places                  nodes of the ranks of a layout, and the groups that communicate
memory                  parameters on each rank, and its bytes by category
"""
