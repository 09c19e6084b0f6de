"""A small GPT on the bytes of real text: `python -m trainer.gpt --help`."""
