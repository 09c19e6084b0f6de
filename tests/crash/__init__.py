"""Writers are killed at every line while readers run. No reader may accept a torn write as complete."""
