"""Event loops, background threads, and the signals and OpenMP threads of a thread."""
