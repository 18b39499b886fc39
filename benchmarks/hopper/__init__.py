"""Kernels, training and serving on one GPU, each beside its rival in the same run: ``python -m benchmarks.hopper``."""
