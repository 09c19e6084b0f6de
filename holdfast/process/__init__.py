"""Tools for operating-system processes: event loops, fork servers, logs, signals, GPUs and sockets."""
