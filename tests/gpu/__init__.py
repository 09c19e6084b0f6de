"""What tests/torch does on a simulated device, on a real one; skipped where there is none."""
