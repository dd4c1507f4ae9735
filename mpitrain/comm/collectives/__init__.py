"""The operations between all ranks: their arguments, their algorithms, and how programs are bound to memory."""
