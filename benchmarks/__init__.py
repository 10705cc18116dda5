"""Measurements of what the package promises. Each is a module to run: `python -m benchmarks.latency --quick`."""
