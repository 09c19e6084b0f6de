"""Unit tests. They mirror the modules and use no torch. They start processes only to test code about them."""
