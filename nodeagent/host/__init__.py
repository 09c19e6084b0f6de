"""Sees the host: its file systems, memory, tables, stuck processes and clock."""
