"""Measurements: each prints a figure, and beside it what it is to be compared with."""
