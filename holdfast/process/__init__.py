"""Processes of the operating system: event loops, fork servers, logs, signals, GPUs and sockets."""
