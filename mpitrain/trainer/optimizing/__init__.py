"""The optimizer, who updates which parameter with it, and its rates over the steps."""
