"""Call the handlers of what is ready, and of nothing that is not waited for any more.

The kernel tells of several descriptors at once. The handler of one may close another, as when a process ends
whose line has a last message, too; and its number may be another's by then.
"""

from __future__ import annotations

import selectors
from collections.abc import Iterator


def ready(selector: selectors.BaseSelector, limit_s: float) -> Iterator[selectors.SelectorKey]:
    """Wait up to `limit_s`, and yield what is ready, but for what was unregistered since."""
    for key, _ in selector.select(limit_s):
        if is_there(selector, key):
            yield key


def is_there(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bool:
    """Say whether `key` is still registered as it was."""
    return (selector.get_map() or {}).get(key.fd) is key
