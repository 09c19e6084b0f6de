"""Writers are killed at every line, and readers run beside writers: no torn write may pass for a whole one."""
