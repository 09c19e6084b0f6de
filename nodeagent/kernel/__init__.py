"""What the kernel says, read from its ring buffer or from the journal."""
