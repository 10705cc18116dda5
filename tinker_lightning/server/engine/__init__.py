"""What computes: base models, adapters, passes, sampling. Knows torch, and nothing of HTTP."""
