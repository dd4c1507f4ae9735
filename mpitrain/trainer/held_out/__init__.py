"""What is measured on samples that a model was not trained on, and what is made of it."""
