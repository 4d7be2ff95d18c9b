"""Attention backends, one file each, behind `octavo.execution.attention.interface`."""
