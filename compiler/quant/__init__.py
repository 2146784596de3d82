"""Quantisation: the W4-G32-S8 weight format and its packed layout."""
