"""Loaders; the only rooms that import an engine."""
