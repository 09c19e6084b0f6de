"""Leaders that are frozen, cut off or killed, and their successors."""
