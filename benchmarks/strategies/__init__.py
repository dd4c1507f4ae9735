"""One model by every strategy."""
