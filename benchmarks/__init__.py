"""Benchmarks: one module per claim, one runner; measured and printed, never asserted."""
