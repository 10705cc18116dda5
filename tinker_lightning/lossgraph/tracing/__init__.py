"""Turns a Python function into a graph, by running it once on stand-ins that record what is done with them."""
