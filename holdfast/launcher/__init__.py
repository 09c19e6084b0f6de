"""The launcher of a member: makes warm processes, starts and watches ranks, and notices how they end."""
