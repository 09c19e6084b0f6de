"""TOML text to values: by the standard library, or on Python 3.10 by tomli, which has the same interface."""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib as _toml
else:
    import tomli as _toml

TomlError = _toml.TOMLDecodeError  # a ValueError


def loads(text: str) -> dict[str, Any]:
    """Return what a TOML document says. Raises TomlError, whose message names line and column."""
    return _toml.loads(text)
