"""The plugin that lets vLLM serve prepared folders."""
