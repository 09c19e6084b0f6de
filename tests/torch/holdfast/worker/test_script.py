"""A script that formed a process group ends as under the interpreter, whatever it did to its streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.protocol.launcher_messages import UNFLUSHED
from tests.torch.holdfast.script_ending import ended


@pytest.mark.parametrize(
    "last",
    [
        "sys.stdout.close()",
        "sys.stdout = None",
        "sys.stderr.close()",
        "sys.stdout.close(); sys.stderr = None",
        "sys.stdout = open('log', 'w'); sys.stdout.close()",
    ],
)
def test_a_script_that_closed_its_streams_ends_successfully(tmp_path: Path, last: str) -> None:
    done, said = ended(tmp_path, last)
    assert (done.returncode, done.stdout, said) == (0, "trained\n", []), done.stderr
    assert "Traceback" not in done.stderr


FULL = "sys.stdout = open('/dev/full', 'w'); print('lost')"
CLOSED = "read, write = os.pipe(); os.close(read); sys.stdout = os.fdopen(write, 'w'); print('lost')"
GONE = "dist.destroy_process_group(); "
AT_EXIT = "sys.stdout = open('/dev/full', 'w'); import atexit; atexit.register(print, 'lost')"


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (FULL, "No space left on device"),
        (GONE + FULL, "No space left on device"),
        (CLOSED, "Broken pipe"),
        (GONE + CLOSED, "Broken pipe"),
        (AT_EXIT, "No space left on device"),
        (GONE + AT_EXIT, "No space left on device"),
        (f"{FULL}; sys.exit(0)", "No space left on device"),
    ],
)
def test_unwritable_output_at_the_end_sets_the_interpreters_exit_code_and_is_no_failure_of_the_script(
    tmp_path: Path, last: str, why: str
) -> None:
    done, [said] = ended(tmp_path, last)
    assert done.returncode == 120
    assert why in done.stderr
    assert said.what == "failing"
    assert said.ending is not None
    assert said.ending.is_good
    assert (said.ending.code, said.ending.fail) == (120, UNFLUSHED)
    assert why in said.ending.message


def test_a_script_that_fails_or_exits_deliberately_reports_that_first(tmp_path: Path) -> None:
    _, said = ended(tmp_path, f"{FULL}; sys.exit(5)")
    assert said[0].ending is not None
    assert (said[0].ending.code, said[0].ending.fail) == (5, "system_exit")
    _, said = ended(tmp_path, f"{FULL}; raise ValueError")
    assert said[0].ending is not None
    assert (said[0].ending.code, said[0].ending.fail) == (1, "exception")
