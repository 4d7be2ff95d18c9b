"""Implementations of `octavo.core.protocols.Executor` that run a model."""
