"""What kernels want: row order, tile and padding, as data."""
