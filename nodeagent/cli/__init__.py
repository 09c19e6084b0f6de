"""The commands of `holdfast node`, their options and their output. Also generates docs/signals.md."""
