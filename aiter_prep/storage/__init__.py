"""Bytes on disk: knows safetensors, no model and no kernel."""
