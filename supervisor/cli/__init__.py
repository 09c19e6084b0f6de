"""The commands of `holdfast`: their options and their output."""
