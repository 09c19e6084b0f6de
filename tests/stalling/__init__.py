"""Storage that stops responding, for tests: see `stall.c`."""
