"""The OpenCL back end: its source, and a host that runs a plan with it."""
