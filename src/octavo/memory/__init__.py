"""Policy on blocks: who owns which, and what must be copied. Knows no tensors and no clock."""
