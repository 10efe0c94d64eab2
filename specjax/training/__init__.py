"""Training of draft heads: data that the target writes, losses, the loop."""
