"""A decoder-only transformer, GPT-2's (Radford et al. 2019) or Llama's (Touvron et al. 2023) by its settings.

model           the model: embedding, blocks (attention and MLP, each on the normed stream and added to it), head
names           the parameters' names and layouts in Hugging Face's GPT-2 and Llama
"""

from mpitrain.models.gpt.model import GPT, Attention, Form, TransformerBlock

__all__ = ["GPT", "Attention", "Form", "TransformerBlock"]
