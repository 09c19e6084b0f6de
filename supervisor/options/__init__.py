"""The options of `holdfast run`, which are also annotations of pods, and the types of their values."""
