"""The options of `holdfast run`, which are annotations of pods too, and the types of their values."""
