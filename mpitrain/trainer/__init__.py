"""The trainer: from a configuration to a trained model, step by step, with what hangs on a step as callbacks."""
