"""A remote model as a node of the local autograd graph."""
