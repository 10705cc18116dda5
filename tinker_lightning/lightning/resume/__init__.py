"""Exact resume: data position, loop position and random number generators."""
