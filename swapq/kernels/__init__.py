"""Kernels: ``reference.py`` is the readable definition on any device; ``dispatch.py`` chooses what runs."""
