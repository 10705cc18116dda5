"""Base models, adapters, passes and sampling. Depends on torch, and not on HTTP."""
