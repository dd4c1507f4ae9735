"""Training without waiting for every rank at every step: a parameter server, and replicas averaged periodically."""
