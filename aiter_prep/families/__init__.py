"""What models call things: names and config.json, no bytes."""
