"""How programs run: compiled, bound, executed, compared between ranks, waited for and watched."""
