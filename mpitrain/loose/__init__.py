"""Training that does not wait for every rank at every step: a parameter server, and replicas averaged now and then."""
