"""Ordered passes over the IR, from imported ONNX nodes to calls of kernels."""
