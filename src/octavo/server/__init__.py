"""OpenAI-compatible HTTP over `octavo.engine.client`. Imports no torch and no execution code."""
