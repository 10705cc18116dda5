"""Event loops, background threads, waiting for them, and signals."""
