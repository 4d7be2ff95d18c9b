"""Policy on time: which sequences run in a step and how many tokens each. No torch, no clock."""
