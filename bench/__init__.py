"""Benchmarks of Holdfast, most of them compared with torchrun or plain copies. Not shipped."""
