"""The trainer, which turns a configuration into a trained model, and the callbacks that it calls at each step."""
