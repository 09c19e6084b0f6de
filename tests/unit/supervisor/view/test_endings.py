from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.launcher_messages import Ending
from supervisor.view.endings import is_victim, kind_of_fault, signature
from supervisor.view.faults import root_cause
from supervisor.view.model import Fault

MS = 1_000_000

VICTIM = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/app/train.py", line 33, in <module>
[rank0]:     loss.backward()
[rank0]:   File "/venv/torch/_tensor.py", line 623, in backward
[rank0]:     torch.autograd.backward(
[rank0]:   File "/venv/torch/autograd/graph.py", line 979, in _engine_run_backward
[rank0]:     return Variable._execution_engine.run_backward(  # Calls into the C++ engine
[rank0]:            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank0]: RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by \
peer [127.0.0.1]:16790. This is typically caused by a remote worker crashing.
"""
BUG = """\
step 6: fine
Traceback (most recent call last):
  File "/app/train.py", line 90, in <module>
    main()
  File "/app/train.py", line 71, in main
    raise ValueError(f"shape {shape} of <object at 0x7f3c{noise:x}> in pid {pid}")
ValueError: shape (3, 4) of <object at 0x7f3c21> in pid 4711
note: the second line of its message
"""
CHAINED = """\
Traceback (most recent call last):
  File "/app/data.py", line 5, in read
    open(name)
FileNotFoundError: [Errno 2] No such file or directory: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/app/train.py", line 20, in <module>
    read()
my.errors.DataGone
"""
GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/app/train.py", line 8, in <module>
  |     raise ExceptionGroup("both", errors)
  | ExceptionGroup: both (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/app/train.py", line 5, in <module>
    |     1 / 0
    | ZeroDivisionError: division by zero
    +------------------------------------
"""
SYNTAX = """\
  File "/app/train.py", line 3
    def f(:
          ^
SyntaxError: invalid syntax
"""


def killed(at_ms: int, signum: int = 9, message: str = "") -> Ending:
    return Ending(at_ms * MS, None, signum, message=message)


def failed(at_ms: int, kind: str, message: str = "", code: int = 1) -> Ending:
    """Return the ending of a rank that reported its failure 3 ms before its process was gone."""
    return Ending(at_ms * MS, code, fail=kind, failed_ns=(at_ms - 3) * MS, message=message)


def victim(at_ms: int) -> Ending:
    return failed(at_ms, "distributed", VICTIM)


FINISHED = Ending(MS, 0)


def blamed(endings: tuple[tuple[int, Ending], ...]) -> int:
    """Return the rank whose ending is the root cause."""
    found = [
        Fault(kind_of_fault(each), rank, "m0", 5, each.failed_ns or each.at_ns, "", "")
        for rank, each in endings
        if not each.is_good
    ]
    return root_cause(tuple(found)).rank


@pytest.mark.parametrize(
    ("first", "second", "root"),
    [
        pytest.param(victim(101), killed(100), 1, id="kill, seen before its victim"),
        pytest.param(victim(100), killed(105), 1, id="kill, seen after its victim"),
        pytest.param(victim(10), failed(40, "exception", BUG), 1, id="bug that is slow to end"),
        pytest.param(
            failed(10, "", VICTIM),
            failed(40, "exception", BUG),
            1,
            id="victim of which only the log is known",
        ),
        pytest.param(
            killed(10, 6, "terminate called\nwhat(): NCCL error: remote"),
            killed(40, 11),
            1,
            id="victim that its library aborted",
        ),
        pytest.param(killed(10, 6), killed(40, 11), 0, id="its own abort"),
        pytest.param(victim(12), victim(11), 1, id="only victims"),
        pytest.param(failed(50, "exception", BUG), failed(49, "exception", BUG), 1, id="first of two"),
        pytest.param(failed(50, "numeric"), failed(50, "numeric"), 0, id="both at the same time"),
        pytest.param(FINISHED, victim(9), 1, id="one finished, one is a victim"),
        pytest.param(FINISHED, failed(9, "system_exit", code=3), 1, id="exit code of the script"),
        pytest.param(failed(1, "system_exit", code=0), failed(9, "exception", BUG), 1, id="exit(0)"),
        pytest.param(victim(1), Ending(9 * MS, 17), 1, id="only an exit code"),
    ],
)
def test_the_root_cause_is_blamed_whatever_the_order_of_the_endings(
    first: Ending, second: Ending, root: int
) -> None:
    assert blamed(((0, first), (1, second))) == blamed(((1, second), (0, first))) == root


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (VICTIM, True),
        ("torch.distributed.DistBackendError: NCCL error in: ...", True),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", True),
        (BUG, False),
        (VICTIM + BUG, False),
        ("", False),
    ],
)
def test_a_victim_is_recognized_by_its_last_message(message: str, expected: bool) -> None:
    assert is_victim(failed(10, "", message)) is expected
    assert not is_victim(failed(10, "exception", message)), "the rank has classified its failure itself"
    assert not is_victim(failed(10, "numeric", message))
    assert not is_victim(killed(10, 9, message))


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        (killed(5, 11, BUG), "signal 11"),
        (failed(5, "system_exit", code=3), "system_exit 3"),
        (failed(5, "exception", BUG), "exception ValueError at /app/train.py:71"),
        (failed(5, "exception", CHAINED), "exception my.errors.DataGone at /app/train.py:20"),
        (failed(5, "exception", GROUP), "exception ZeroDivisionError at /app/train.py:5"),
        (failed(5, "exception", SYNTAX), "exception SyntaxError at /app/train.py:3"),
        (victim(5), "distributed RuntimeError at /venv/torch/autograd/graph.py:979"),
        (failed(5, "", "INFO: hello\n", code=17), "exit 17"),
        (failed(5, "bad_input", "--lr: -1 is not a rate above 0", code=2), "bad_input 2"),
        (failed(5, "exception", BUG[: BUG.index("ValueError: ")]),
         "exception unknown at /app/train.py:71"),
    ],
)  # fmt: skip
def test_each_failure_has_its_signature(ending: Ending, expected: str) -> None:
    assert signature(ending) == expected


def test_the_same_failure_again_has_the_same_signature() -> None:
    first = failed(5, "exception", BUG)
    again = replace(
        first, at_ns=99 * MS, failed_ns=98 * MS,
        message=BUG.replace("0x7f3c21", "0x7f3c99").replace("4711", "4712"),
    )  # fmt: skip
    assert signature(first) == signature(again)
    assert signature(first) != signature(replace(first, message=BUG.replace("line 71", "line 72")))


@given(
    st.text(max_size=200),
    st.sampled_from(["", "exception", "system_exit", "distributed", "bad_input", "numeric"]),
)
def test_any_message_has_one_line_for_its_signature(message: str, kind: str) -> None:
    assert len(signature(failed(5, kind, message)).splitlines()) == 1
