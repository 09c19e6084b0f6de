"""The options of `holdfast run` and the types of their values. Many are also annotations of pods."""
