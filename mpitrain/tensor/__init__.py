"""Tensor parallelism: layers divided over the ranks of one mesh axis, within a node if possible.

`parallelize` divides a plain model by the names of its modules. The parallel layers and functions that it uses are also
public.
"""

from mpitrain.tensor.axis import Axis
from mpitrain.tensor.linear import ColumnParallelLinear, RowParallelLinear
from mpitrain.tensor.plan import parallelize, plan_for
from mpitrain.tensor.styles import Column, ParallelStyle, Row, Vocabulary
from mpitrain.tensor.vocabulary import VocabularyCrossEntropy, VocabularyParallelEmbedding, cross_entropy

__all__ = ["Axis", "Column", "ColumnParallelLinear", "ParallelStyle", "Row", "RowParallelLinear", "Vocabulary"]
__all__ += ["VocabularyCrossEntropy", "VocabularyParallelEmbedding", "cross_entropy", "parallelize", "plan_for"]
