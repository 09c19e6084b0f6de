"""The two sensors of the kernel log: one reads its ring buffer, the other reads systemd's journal."""
