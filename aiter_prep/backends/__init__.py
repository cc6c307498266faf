"""Who moves the bytes."""
