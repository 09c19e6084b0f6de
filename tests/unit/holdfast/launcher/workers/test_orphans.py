"""What happens to the processes that ranks leave behind once the member ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The process under test ends all of its children, so it must not be the process of the tests.
_PROGRAM = """
import subprocess, sys, time
from holdfast.launcher.workers.orphans import Orphans
orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
orphans, lines = Orphans(), []
orphans.begin_to_end(100.0, let_work=sys.argv[1] == "let work")
print("waits", orphans.end(99.0, lines.append), lines)
if sys.argv[1] == "let work":
    print("waits", orphans.end(100.0, lines.append), lines == [
        f"process {orphan.pid} (sleep 600), which the script left in the background,"
        " did not end within --grace: killing it"
    ])
    orphan.kill()
print("ended by", -orphan.wait())
print("waits", orphans.end(99.0, lines.append))
"""


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("end all", ["waits True []", "ended by 15", "waits False"]),
        ("let work", ["waits True []", "waits False True", "ended by 9", "waits False"]),
    ],
)
def test_orphans_are_asked_to_end_unless_they_may_still_have_work_to_do(
    how: str, expected: list[str]
) -> None:
    found = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == expected
