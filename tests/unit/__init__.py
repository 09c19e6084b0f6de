"""Unit tests: mirror the modules; no processes but where the module is about them, and no torch."""
