"""The launcher of a member: keeps warm processes, starts and watches ranks, and records how they end."""
