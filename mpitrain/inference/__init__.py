"""Uses of trained models: text generated from prompts, and predictions for samples."""
