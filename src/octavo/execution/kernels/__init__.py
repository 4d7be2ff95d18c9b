"""Compiled kernels. Each has a PyTorch reference and a test on odd shapes."""
