"""Models: one file a family, their layers, and the loading of weights. Knows nothing of blocks."""
