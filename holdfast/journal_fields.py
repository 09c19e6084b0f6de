"""Mark the fields of dataclasses that the supervisor's journal omits.

The journal contains views, actions and the messages within them. A field is omitted if no reader of the
journal needs it: it is only displayed, or used only on a cluster, which has no journal. Messages still have
these fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from types import MappingProxyType
from typing import Any

_IN_JOURNAL = "in_journal"  # the key of a field's metadata

UNRECORDED: Mapping[str, bool] = MappingProxyType({_IN_JOURNAL: False})  # metadata of a dataclass field


def is_recorded(declared: Field[Any]) -> bool:
    """True if the journal contains the field."""
    return bool(declared.metadata.get(_IN_JOURNAL, True))
