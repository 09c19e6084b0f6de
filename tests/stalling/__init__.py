"""Storage that does not answer, for the tests: see `stall.c`."""
