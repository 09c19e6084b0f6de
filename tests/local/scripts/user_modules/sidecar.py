"""A user's own module with the name of a part of ours."""

from __future__ import annotations

WHOSE = "theirs"
