"""A decoder-only transformer, GPT-2's (Radford et al. 2019) or Llama's (Touvron et al. 2023) by its settings.

form            what a block is made of
model           the model: embedding, blocks, head
block           attention and MLP, each on the normed stream and added to it
attention       causal attention, with grouped queries, of documents that follow each other
positions       rotary and learned
names           the parameters' names and layouts in Hugging Face's GPT-2 and Llama
"""

from mpitrain.models.gpt.attention import Attention
from mpitrain.models.gpt.block import TransformerBlock
from mpitrain.models.gpt.form import Form
from mpitrain.models.gpt.model import GPT

__all__ = ["GPT", "Attention", "Form", "TransformerBlock"]
