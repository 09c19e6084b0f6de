"""An exception is named by its type and the first line of its message."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import BadInput
from holdfast.protocol import foreign_text
from holdfast.protocol.foreign_text import sent_bytes
from holdfast.worker import script
from holdfast.worker.launcher_channel import LauncherChannel

COMPILER = "backend failed:\n" + "\n".join(f"  %{n} = call_function[target=add]" for n in range(9000))


class Named(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError(COMPILER), "RuntimeError: backend failed:"),
        (ValueError("bad"), "ValueError: bad"),
        (ValueError("\n\n  shapes differ:\n(3, 4)"), "ValueError: shapes differ:"),
        (KeyError("weight"), "KeyError: 'weight'"),
        (AssertionError(), "AssertionError"),
        (Named("no"), f"{__name__}.Named: no"),
        (SyntaxError("invalid syntax", ("train.py", 3, 5, "if x\n")), "SyntaxError: invalid syntax"),
        (RuntimeError("я" * 900), "RuntimeError: " + "я" * 186),
    ],
)
def test_an_exception_is_named_by_its_type_and_first_line(error: BaseException, raised: str) -> None:
    said = script.ending_of(error, 5, "the traceback")
    assert said is not None
    assert said.raised == raised


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_that_cannot_be_printed_is_named_by_its_type() -> None:
    error = Unprintable("x")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert script._with_explanation(error, LauncherChannel(ours, Path(), 0, 1)) is error
    said = script.ending_of(error, 5, "the traceback")
    assert said is not None
    assert (said.fail, said.raised.partition(":")[0]) == ("exception", f"{__name__}.Unprintable")


def test_a_script_whose_path_begins_like_the_path_of_holdfast_is_named() -> None:
    beside = f"{Path(script.__file__).parents[1]}_examples/train.py"
    with pytest.raises(BadInput) as caught:
        exec(compile("\ndef f(error): raise error\nf(error)", beside, "exec"), {"error": BadInput("no")})
    said = script.ending_of(caught.value, 5, "the traceback")
    assert said is not None
    assert said.message == f"no ({beside}, line 2)"


def test_notes_do_not_hide_the_exception() -> None:
    error = ValueError("bad")
    vars(error)["__notes__"] = ["while it was read"]
    noted = script.ending_of(error, 5, "")
    assert noted is not None
    assert noted.raised == "ValueError: bad"


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (
            KeyError("RANK"),
            "holdfast: RANK is in the environment only after holdfast.join(), so call join() first.",
        ),
        (KeyError("rank"), ""),
        (ModuleNotFoundError("No module named 'torhc.nn'", name="torhc.nn"), sys.executable),
        (ModuleNotFoundError("No module named 'json.nn'", name="json.nn"), ""),
        (ModuleNotFoundError("no"), ""),
    ],
)
def test_errors_caused_by_the_way_a_script_is_run_have_a_hint(error: Exception, hint: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        explained = script._with_explanation(error, LauncherChannel(ours, Path(), 0, 1))
    assert explained is error
    notes = vars(error).get("__notes__", [])
    assert hint in "".join(notes)
    assert len(notes) == bool(hint)


def test_a_long_text_keeps_its_frames_and_its_end() -> None:
    text = f'Traceback\n  File "train.py", line 7\nRuntimeError: {COMPILER}'
    said = script.ending_of(RuntimeError(COMPILER), 5, text)
    assert said is not None
    assert 0.9 * foreign_text.WHOLE_BYTES < sent_bytes(said.message) <= foreign_text.WHOLE_BYTES
    assert said.message.startswith('Traceback\n  File "train.py", line 7\nRuntimeError: backend failed:\n')
    assert said.message.endswith("%8999 = call_function[target=add]")


AT_EXIT = """
import os, socket, sys
from pathlib import Path
from holdfast.worker import script as ending
from holdfast.errors import BadInput
from holdfast.worker.launcher_channel import LauncherChannel
mine = LauncherChannel(socket.socket(), Path(), 0, 1)
mine.on_leaving = lambda: print("last", flush=True)
mine.on_failing = lambda: print("failing", flush=True)
ending.keep_last_state_at_exit(mine)
"""


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ("", "last"),
        ("sys.exit(0)", "last"),
        ("raise RuntimeError('no')", "failing"),
        ("raise BadInput('no')", ""),
        ("os._exit(0)", ""),
        ("if not os.fork(): sys.exit(0)\nos.wait()", "last"),
    ],
)
def test_an_interpreter_that_runs_the_script_itself_keeps_its_state_at_its_end(how: str, kept: str) -> None:
    found = subprocess.run([sys.executable, "-c", AT_EXIT + how], stdout=subprocess.PIPE, text=True)
    assert found.stdout.split() == ([kept] if kept else [])
