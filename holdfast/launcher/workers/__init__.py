"""The processes of one member's ranks: warm ones, the workers of a generation, and what they leave behind."""
