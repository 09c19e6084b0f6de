"""Writers killed at every line, and readers beside writers: no torn write may pass for a whole one."""
