"""Logits to tokens, vectorized over rows."""
