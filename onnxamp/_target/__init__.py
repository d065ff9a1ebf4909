"""What a target can run, and how fast."""
