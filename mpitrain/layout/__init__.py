"""Ownership of tensors: the axes and groups of ranks, the record of each tensor, and the slices that ranks have of it.

boxes      which rank owns which slice of which tensor, and offsets into shares
mesh       every rank's place along the axes
ownership  which axes divide a tensor, and which rank acts for those that have a copy of it
"""
