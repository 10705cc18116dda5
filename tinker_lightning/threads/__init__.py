"""Event loops and background threads."""
