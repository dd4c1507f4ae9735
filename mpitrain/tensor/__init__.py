"""Tensor parallelism: layers divided over the ranks of one axis of the mesh, inside a node where possible.

`parallelize` applies it to a plain model by module names; the layers and functions it is made of stand beside it.
"""

from mpitrain.tensor.axis import Axis
from mpitrain.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpitrain.tensor.plan import parallelize, plan_for
from mpitrain.tensor.styles import Column, ParallelStyle, Row, Vocabulary
from mpitrain.tensor.vocabulary import VocabularyCrossEntropy, VocabularyParallelEmbedding, cross_entropy

__all__ = ["Axis", "Column", "ColumnParallelLinear", "ParallelStyle", "Row", "RowParallelLinear", "Vocabulary"]
__all__ += ["VocabularyCrossEntropy", "VocabularyParallelEmbedding", "cross_entropy", "parallelize", "plan_for"]
