"""What trained models are good for: text that goes on from prompts, and predictions for samples."""
