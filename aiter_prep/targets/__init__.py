"""What an engine of a version wants: one table each."""
