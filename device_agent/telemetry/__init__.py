"""Telemetry: count answers, cut batches, keep them until the server has them."""
