"""Entry points on the command line."""
