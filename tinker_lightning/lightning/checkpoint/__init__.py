"""Checkpoint files of remote models: format, contents, exact resume, and the lifetime of remote states."""
