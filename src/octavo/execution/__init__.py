"""Mechanism: obeys plans with torch, kernels and drivers. Decides nothing about requests."""
