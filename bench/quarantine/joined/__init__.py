"""The simulated year with real agents on simulated machines; see `joined`."""
