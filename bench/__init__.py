"""Benchmarks of Holdfast. Most compare it with torchrun or with plain copies. Not shipped."""
