"""Tests of the kernels in numba's CUDA simulator."""
