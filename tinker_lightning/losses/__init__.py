"""Loss functions on log-probabilities."""
