"""Kernels: what a lowered program may say, and the C that does it."""
