"""`mpitrain.initialize`: what a training loop of one's own calls."""
