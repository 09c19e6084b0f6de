from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from supervisor.accounts import Accounts
from supervisor.records import Records
from supervisor.rundir import RunDir
from supervisor.view import View
from tests.unit.supervisor.views import launcher, member, progress, rank, report, view


def seen(*owns_s: float) -> View:
    """Return a view of members whose ranks have these own times; 0 is not known."""
    members = []
    for number, own_s in enumerate(owns_s):
        said = replace(
            progress(number, 200), own_s=own_s, own_least_s=own_s, own_data_s=own_s / 4, own_steps=50
        )
        members.append(member(f"m{number}", report(f"m{number}", launcher(rank(number)), progress=(said,))))
    return view(*members)


def test_the_status_says_which_ranks_are_slow_until_they_no_longer_are(tmp_path: Path) -> None:
    records = Records(RunDir(tmp_path))

    def told(*owns_s: float) -> list[tuple[Any, ...]]:
        now = seen(*owns_s)
        found = records.status(now, Accounts(now.now_ns, None), None)["ranks"]
        return [
            tuple(each[k] for k in ("own_s", "own_data_s", "slow", "slow_since", "peers_s")) for each in found
        ]

    usual = (0.03, 0.0075, None, None, None)
    assert told(0.0, 0.09) == [(None, None, None, None, None), (0.09, 0.0225, None, None, None)]
    assert told(0.03, 0.09) == [usual, (0.09, 0.0225, 3.0, 150, 0.03)]
    assert told(0.03, 0.042) == [usual, (0.042, 0.0105, 1.4, 150, 0.03)]
    assert told(0.03, 0.0) == [usual, (None, None, 1.4, 150, 0.03)]
    assert told(0.03, 0.03) == [usual, usual]
