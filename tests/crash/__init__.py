"""Writers are killed at every line while readers run. No reader may take a torn write for a complete one."""
