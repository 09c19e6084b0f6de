"""The version of Holdfast. It is defined only here."""

__version__ = "0.1.0"
