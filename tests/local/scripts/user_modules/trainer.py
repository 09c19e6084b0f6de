"""A user's own module that is named like a part of Holdfast."""

from __future__ import annotations

WHOSE = "theirs"
