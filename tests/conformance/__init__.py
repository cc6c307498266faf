"""Conformance tests: prepared folders against the bytes that the engine itself holds."""
