"""The commands of `python -m compiler`, one module each, loaded when they are asked for."""
