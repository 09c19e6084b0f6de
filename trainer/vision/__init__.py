"""A small ResNet on scikit-learn's digits, or on made images: `python -m trainer.vision --help`."""
