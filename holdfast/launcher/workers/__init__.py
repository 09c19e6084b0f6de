"""One member's workers: warm processes, the ranks of a generation, and what they leave behind."""
