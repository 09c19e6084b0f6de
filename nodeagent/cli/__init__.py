"""The commands of `holdfast node`: options, assembly of an agent, tables, explanations, docs/signals.md."""
