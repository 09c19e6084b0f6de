"""Unit tests. They mirror the modules, use no torch, and start processes only for modules about processes."""
