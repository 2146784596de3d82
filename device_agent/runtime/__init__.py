"""Answering: load a verified bundle, keep one session, count what happens."""
