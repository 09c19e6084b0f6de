"""A member's launcher: keeps warm processes, starts and watches ranks, and records how they end."""
