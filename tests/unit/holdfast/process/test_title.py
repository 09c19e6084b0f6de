"""`ps` shows the titles of real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LONG = "x" * 200  # an argument that makes room for a title

SCRIPT = """
import os, sys
from pathlib import Path
from holdfast.process import title

def shown():
    return Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode()

def by_ps():
    return os.popen(f"ps -o args= -p {os.getpid()}").read().strip()

"""


def printed(code: str, *arguments: str) -> list[str]:
    """Return the lines that `code` prints in a separate process."""
    argv = [sys.executable, "-c", SCRIPT + code, *arguments]
    ended = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stderr == ""
    return ended.stdout.splitlines()


def test_ps_shows_a_title_instead_of_the_command_line() -> None:
    code = (
        "title.set_title('rank 0 tr\\xe4in.py'); print(shown()); print(by_ps());"
        " print(os.environ['PATH'] != '')"
    )
    assert printed(code, LONG) == ["holdfast: rank 0 träin.py"] * 2 + ["True"]


def test_a_fork_takes_another_title_and_its_parent_keeps_its_own() -> None:
    code = """
title.set_title("fork server (a title that is longer than the next)")
if os.fork() == 0:
    title.set_title("warm process 2")
    title.change("rank 1 train.py")
    print(shown(), flush=True)
    os._exit(0)
os.wait()
print(shown())
"""
    assert printed(code) == [
        "holdfast: rank 1 train.py",
        "holdfast: fork server (a title that is longer than the next)",
    ]


def test_a_title_is_cut_to_the_length_of_the_command_line_and_leaves_the_environment_intact() -> None:
    code = """
before, variables = Path("/proc/self/cmdline").read_bytes(), Path("/proc/self/environ").read_bytes()
title.set_title("x" * 100_000)
after = Path("/proc/self/cmdline").read_bytes()
print(len(after) == len(before), after[-2:] == b"x\\0", Path("/proc/self/environ").read_bytes() == variables)
"""
    assert printed(code) == ["True True True"]


def test_a_process_without_a_title_is_unchanged() -> None:
    assert printed("title.change('rank 0 train.py'); print(shown().split('\\0')[-1])", "last") == ["last"]


def test_a_title_that_the_script_has_set_is_kept() -> None:
    code = """
title.set_title("warm process 2")
fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
with open("/proc/self/mem", "r+b", buffering=0) as memory:
    memory.seek(int(fields[45]))
    memory.write(b"mine own title\\0")
before = shown()
title.change("rank 0 train.py")
print(shown() == before)
"""
    assert printed(code, LONG) == ["True"]


def test_the_command_line_can_be_restored() -> None:
    code = """
before = Path("/proc/self/cmdline").read_bytes()
title.set_title("fork server")
title.set_title("warm process 2")
title.give_back()
title.change("rank 0 train.py")
print(Path("/proc/self/cmdline").read_bytes() == before)
"""
    assert printed(code, LONG) == ["True"]


@pytest.mark.parametrize(
    "broken",
    [
        "os.open = lambda *_: (_ for _ in ()).throw(PermissionError())",
        "os.pwrite = lambda *_: (_ for _ in ()).throw(OSError(5, 'EIO'))",
        "os.pread = lambda *_: b'other'",
        "Path.read_text = lambda *_: ''",
        "Path.read_text = lambda *_: '1 (python) S ' + '0 ' * 60",
    ],
)
def test_where_a_title_cannot_be_set_nothing_happens(broken: str) -> None:
    code = f"before = shown()\n{broken}\ntitle.set_title('rank 0 train.py')\nprint(shown() == before)"
    assert printed(code) == ["True"]


def test_no_other_module_spells_a_fork_servers_title() -> None:
    folder = Path(__file__).parents[4] / "holdfast"
    spelled = [path.name for path in folder.rglob("*.py") if "fork server (" in path.read_text()]
    assert spelled == ["title.py"]
