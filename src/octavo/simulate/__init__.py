"""The serving policy under a simulated executor."""
