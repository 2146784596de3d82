"""Emitters: a module as plan bytes and sections, kernels as C and as a shared library."""
