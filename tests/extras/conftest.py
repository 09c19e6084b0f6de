"""Provide the local tests' fixture that starts runs."""

from tests.local.conftest import start

__all__ = ["start"]
