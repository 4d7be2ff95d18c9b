"""The words all rooms share. Plain dataclasses and arithmetic: no torch, no clock, no I/O."""
