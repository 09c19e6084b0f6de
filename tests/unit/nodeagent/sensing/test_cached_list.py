from __future__ import annotations

from nodeagent.sensing.sweep import LIST_S, CachedList


def test_the_list_is_refreshed_once_a_minute_and_not_at_every_read() -> None:
    made = iter(range(100))
    listing = CachedList(lambda: (next(made),))
    assert not listing.last
    assert [listing.at(now_s) for now_s in (0.0, 5.0, LIST_S - 1, LIST_S, LIST_S + 1)] == [
        (0,), (0,), (0,), (1,), (1,),
    ]  # fmt: skip
    assert listing.last == (1,)
