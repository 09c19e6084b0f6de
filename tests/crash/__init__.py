"""Writers are killed at every line, and readers run concurrently: no torn write may pass for complete."""
