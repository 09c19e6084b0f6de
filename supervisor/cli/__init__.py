"""The commands of `holdfast`: their options, and what they print."""
