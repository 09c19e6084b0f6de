"""The fixture that starts runs is that of the local tests."""

from tests.local.conftest import start

__all__ = ["start"]
