"""Benchmarks of the promises that the package makes. Run each as a module: `python -m benchmarks.latency --quick`."""
