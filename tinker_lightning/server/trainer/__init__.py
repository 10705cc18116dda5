"""Scheduling, sessions, checkpoints and registered losses of the embedded trainer."""
