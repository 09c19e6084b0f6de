"""A small ResNet on scikit-learn's digits, or on generated images: `python -m trainer.vision --help`."""
