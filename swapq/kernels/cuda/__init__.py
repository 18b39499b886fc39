"""Kernels in CUDA C++, compiled at first use by NVRTC: no compiler on the user's machine, the result kept in a cache folder."""
