"""A model of a device on the host's own memory: queues that lag, poison, and proofs of order."""
