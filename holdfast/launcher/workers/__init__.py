"""One member's rank processes: warm ones, a generation's workers, and what they leave behind."""
