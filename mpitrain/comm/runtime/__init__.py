"""How programs run: compiled, bound, executed, waited for and watched."""
