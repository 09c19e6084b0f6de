"""The place where an exception was raised, not its text, shows whether the rank has lost its peers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.errors import BadInput, PeerLost
from holdfast.inspection.victims import in_log, is_victim, lost_peers, mismatch
from holdfast.worker import script
from holdfast.worker.script import classify_failure


class Group(Exception):
    """Like ExceptionGroup in Python 3.11."""

    def __init__(self, exceptions: tuple[BaseException, ...]) -> None:
        super().__init__("of a pool")
        self.exceptions = exceptions


class Odd(RuntimeError):
    @property
    def exceptions(self) -> object:
        raise LookupError

    def __str__(self) -> str:
        raise LookupError


GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:13206. This is typically caused by a remote worker crashing. Check the logs of the remote w"
)
MISMATCH = (
    "[enforce fail at /__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] "
    "op.preamble.length <= op.nbytes. 12 vs 4. Received data size doesn't match expected size. "
    "Is there a distributed collective mismatch in your code?"
)
C10D = "/venv/torch/distributed/distributed_c10d.py"
DDP = "/venv/torch/nn/parallel/distributed.py"
ENGINE = "/venv/torch/autograd/graph.py"
SCRIPT = "/app/train.py"
RPC = "/venv/torch/distributed/rpc/api.py"
RESET = "Connection reset by peer"
TENSORPIPE = "eof (this error originated at tensorpipe/transport/uv/connection_impl.cc:157)"


def raised_in(file: str, body: str, **names: Any) -> BaseException:
    """Run `body` as a function of `file`; return its exception. `raw(kind, text)` raises as C++ does."""
    lines = "\n    ".join(body.splitlines())
    code = compile(f"def run():\n    {lines}\n", file, "exec")
    _, found, inner = file.rpartition("/torch/")
    names["__name__"] = f"torch.{inner[:-3].replace('/', '.')}" if found else "__main__"
    names["raw"] = ctypes.pythonapi.PyErr_SetString
    names["kind"] = ctypes.py_object(RuntimeError)
    exec(code, names)
    run: Callable[[], None] = names["run"]
    with pytest.raises(BaseException) as caught:  # noqa: PT011  # of many types
        run()
    return caught.value


def from_c(file: str, text: str) -> BaseException:
    return raised_in(file, "raw(kind, text.encode())", text=text)


def by_python(file: str, error: BaseException) -> BaseException:
    return raised_in(file, "raise error", error=error)


def torchs(name: str) -> type[RuntimeError]:
    return type(name, (RuntimeError,), {"__module__": "torch.distributed"})


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ConnectionResetError(104, RESET), id="the store hangs up"),
        pytest.param(BrokenPipeError(32, "Broken pipe"), id="the script's own pipe"),
        pytest.param(RuntimeError("cannot read s3://corpus/3.tar: Connection refused"), id="a reader"),
        pytest.param(ImportError("cannot import name 'ProcessGroupNCCL'"), id="only torch's names"),
        pytest.param(type("DistNetworkError", (RuntimeError,), {})("my own"), id="a type with the same name"),
        pytest.param(ValueError("bad"), id="other words"),
    ],
)
def test_an_exception_raised_by_the_script_is_not_a_lost_peer_whatever_its_text(error: BaseException) -> None:
    assert classify_failure(by_python(SCRIPT, error)) == "exception"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(from_c("/venv/s3fs_native/client.py", f"client: {RESET}"), id="another library in C++"),
        pytest.param(from_c(SCRIPT, RESET), id="the same, called by the script"),
        pytest.param(from_c(ENGINE, "mat1 and mat2 shapes cannot be multiplied"), id="a bug in backward"),
        pytest.param(by_python("/venv/torch/_utils.py", RuntimeError(RESET)), id="a loader's worker"),
        pytest.param(by_python(C10D, ConnectionResetError(104, RESET)), id="a socket"),
        pytest.param(
            from_c("/venv/torch/distributed/checkpoint/filesystem.py", "Broken pipe"), id="a file of dcp"
        ),
        pytest.param(from_c(RPC, f"On WorkerInfo(id=1): {RESET}"), id="a script's function called remotely"),
        pytest.param(from_c("/home/me/torchx/distributed/a.py", RESET), id="a package with such a name"),
    ],
)
def test_a_library_that_loses_a_connection_is_not_a_lost_peer(error: BaseException) -> None:
    assert classify_failure(error) == "exception"


VICTIMS = [
    pytest.param(from_c(C10D, GLOO), id="a collective"),
    pytest.param(from_c(C10D, RESET), id="a collective in plain words"),
    pytest.param(from_c(ENGINE, GLOO), id="backward"),
    pytest.param(from_c(DDP, GLOO), id="ddp's buffers"),
    pytest.param(from_c(SCRIPT, GLOO), id="work.wait()"),
    pytest.param(from_c("<eval_with_key>.3", GLOO), id="compiled"),
    pytest.param(from_c("/venv/torch/_ops.py", "NCCL communicator was aborted"), id="an operator"),
    pytest.param(from_c(SCRIPT, "Ranks 1 failed to pass monitoredBarrier in 9 ms"), id="monitored barrier"),
    pytest.param(by_python(C10D, RuntimeError("Timed out waiting 9ms")), id="raised by torch's own Python"),
    pytest.param(by_python(SCRIPT, torchs("DistStoreError")("wait timeout after 9ms")), id="the store"),
    pytest.param(by_python(SCRIPT, torchs("DistBackendError")("unhandled system error")), id="nccl"),
    pytest.param(by_python(SCRIPT, PeerLost("no connection to rank 1")), id="an exchange of Holdfast"),
    pytest.param(by_python(SCRIPT, OSError(f"the step failed: {GLOO}")), id="torch's message, raised again"),
    pytest.param(from_c(RPC, TENSORPIPE), id="a remote call"),
]


@pytest.mark.parametrize("error", VICTIMS)
def test_an_exception_of_torch_about_a_dead_peer_is_a_lost_peer(error: BaseException) -> None:
    assert classify_failure(error) == "distributed"


@pytest.mark.parametrize("inner", VICTIMS)
@pytest.mark.parametrize(
    "how",
    [
        "raise OSError('step failed') from inner",
        "try:\n  raise inner\nexcept Exception as e:\n  raise OSError(f'failed: {e}')",
        "try:\n  raise inner\nexcept Exception:\n  raise OSError('step failed')",
        "try:\n  raise inner\nexcept Exception:\n  raise OSError('step failed') from None",
        "try:\n  raise inner\nexcept Exception:\n  raise BadInput('it cannot load this state')",
        "try:\n  raise inner\nexcept Exception as e:\n  raise e",
        "try:\n  raise inner\nfinally:\n  [][1]",
        "try:\n  raise inner\nexcept Exception:\n  raise SystemExit(3)",
    ],
)
def test_an_exception_that_the_script_derives_from_a_lost_peer_stays_a_lost_peer(
    inner: BaseException, how: str
) -> None:
    error = raised_in(SCRIPT, how, inner=inner, BadInput=BadInput)
    assert classify_failure(error) == "distributed"
    ended = script.ending_of(error, 5, "the traceback")
    assert ended is not None
    assert (ended.fail, ended.code) == ("distributed", 3 if isinstance(error, SystemExit) else 1)


def test_a_later_exception_of_the_script_is_not_a_lost_peer() -> None:
    handled = "try:\n  raise inner\nexcept Exception:\n  pass\n[][1]"
    inner = from_c(C10D, GLOO)
    assert classify_failure(raised_in(SCRIPT, handled, inner=inner)) == "exception"
    assert classify_failure(BadInput(f"an Ema cannot load this state: {GLOO}")) == "bad_input"
    left = script.ending_of(raised_in(SCRIPT, "raise SystemExit(3)"), 5, "")
    assert left is not None
    assert (left.fail, left.code) == ("system_exit", 3)
    swallowed = "try:\n  raise inner\nexcept Exception:\n  raise SystemExit(0)"
    assert script.ending_of(raised_in(SCRIPT, swallowed, inner=inner), 5, "") is None


def test_a_group_is_a_lost_peer_if_all_its_exceptions_are() -> None:
    lost, own = from_c(C10D, GLOO), ValueError("bad")
    assert is_victim(Group((lost, Group((lost,)))))
    assert not is_victim(Group((lost, own)))
    assert not is_victim(Group(()))
    nested: BaseException = lost
    for _ in range(10):
        nested = Group((nested,))
    assert is_victim(nested), "ten levels are examined"
    assert not is_victim(Group((nested,)))
    endless = Group(())
    endless.exceptions = (endless,)
    assert not is_victim(endless)


def test_an_exception_that_cannot_be_printed_is_not_a_lost_peer() -> None:
    assert not is_victim(by_python(SCRIPT, Odd()))


def test_a_long_chain_is_examined_in_linear_time() -> None:
    """Each link once had two paths to the next one, so a chain of 50 took 2**50 visits."""
    error: BaseException = RuntimeError(RESET)
    for _ in range(2000):
        outer = RuntimeError(RESET)
        outer.__cause__ = outer.__context__ = error
        error = outer
    assert not is_victim(error)


def test_exceptions_that_cause_each_other_in_a_circle_end_the_search() -> None:
    first, second = ValueError(RESET), ValueError(RESET)
    first.__cause__, second.__cause__ = second, first
    assert classify_failure(first) == "exception"


FRAME = 'Traceback (most recent call last):\n  File "{}", line 3, in run\n    {}\n'


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (FRAME.format(C10D, "work = group.allreduce([tensor], opts)") + f"RuntimeError: {GLOO}\n", True),
        (FRAME.format(C10D, "work.wait()") + f"RuntimeError: {RESET}\n", True),
        (FRAME.format(SCRIPT, "work.wait()") + f"RuntimeError: {GLOO}\n", True),
        (FRAME.format(SCRIPT, "store.get(key)") + "torch.distributed.DistStoreError: wait timeout\n", True),
        (FRAME.format(SCRIPT, "raise OSError(said)") + f"OSError: step failed: {GLOO}\n", True),
        (FRAME.format(SCRIPT, "raise OSError(said)") + f"OSError: {RESET}\n", False),
        (FRAME.format("torch/_ops.py", "op(x)") + "RuntimeError: NCCL communicator was aborted\n", True),
        (FRAME.format(SCRIPT, "put(name)") + f"ConnectionResetError: [Errno 104] {RESET}\n", False),
        (f'  File "<string>", line 1, in <module>\nConnectionResetError: {RESET}\n', False),
        (f"curl: (56) Recv failure: {RESET}\n", False),
        ("terminate called\n  what(): NCCL error: remote process exited\n", True),
        (
            FRAME.format(C10D, "work.wait()") + f"RuntimeError: {GLOO}\n\nThe above exception was the direct "
            "cause of the following exception:\n\n" + FRAME.format(SCRIPT, "raise Lost from e") + "Lost\n",
            True,
        ),
        (
            FRAME.format(C10D, "work.wait()") + f"RuntimeError: {GLOO}\n\nDuring handling of the above "
            "exception, another exception occurred:\n\n" + FRAME.format(SCRIPT, "1 / 0") + "ZeroDivision\n",
            True,
        ),
        (
            FRAME.format(C10D, "work.wait()") + f"RuntimeError: {GLOO}\nit is handled\n"
            + FRAME.format(SCRIPT, "1 / 0") + "ZeroDivision\n",
            False,
        ),
        (
            "terminate called\n  what(): NCCL error: remote process exited\nFatal Python error: Aborted\n\n"
            'Thread 0x7f (most recent call first):\n  File "/app/train.py", line 7 in <module>\n',
            True,
        ),
        (
            f'Fatal Python error: Aborted\n\n  File "{C10D}", line 7 in all_reduce\n',
            False,
        ),
        (  # of two processes that aborted, the last counts
            f"Fatal Python error: Aborted\n\nterminate called\n  what(): NCCL error: {RESET}\n"
            'Fatal Python error: Aborted\n\n  File "/app/train.py", line 7 in <module>\n',
            True,
        ),
        (FRAME.format(ENGINE, "run_backward(x)") + f"RuntimeError: {RESET}\n", True),
        (FRAME.format(ENGINE, "raise RuntimeError(said)") + f"RuntimeError: {RESET}\n", False),
        (FRAME.format(C10D, "raise RuntimeError(said)") + f"RuntimeError: {RESET}\n", True),
        (FRAME.format(C10D, "raise RuntimeError(said)") + "RuntimeError: bad\n", False),
        (FRAME.format(C10D, "work.wait()") + "RuntimeError: bad\n", False),
        (FRAME.format(SCRIPT, "raise Failed(said)") + "Failed: ProcessGroupNCCL\n", False),
        (FRAME.format(SCRIPT, "work.wait()") + "RuntimeError: ProcessGroupNCCL\n", True),
        (FRAME.format(RPC, "rpc_sync(f)") + f"RuntimeError: {RESET}\n", False),
    ],
)  # fmt: skip
def test_a_process_without_a_report_is_judged_by_its_log_in_the_same_way(log: str, expected: bool) -> None:
    assert in_log(log) is expected
    assert in_log("".join(f"[rank0]: {line}" for line in log.splitlines(keepends=True))) is expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GLOO, "lost its peers (connection closed by peer)"),
        (f"Traceback\n  File x\nRuntimeError: {GLOO}\n", "lost its peers (connection closed by peer)"),
        ("a\nDistBackendError: NCCL error 6\n", "lost its peers (DistBackendError: NCCL error 6)"),
        ("a\nNCCL error " + "x" * 200, "lost its peers (NCCL error " + "x" * 69 + ")"),
        ("Timed out waiting 9ms", "lost its peers (timed out waiting)"),
        ("wait timeout after 9ms", "lost its peers (wait timeout after 9ms)"),
        ("", "lost its peers"),
        ("\n", "lost its peers"),
    ],
)
def test_torchs_text_about_a_dead_peer_is_shortened_to_a_few_words(text: str, says: str) -> None:
    assert lost_peers(text) == says


def test_mismatched_collectives_are_not_a_lost_peer() -> None:
    raised = from_c(C10D, MISMATCH)
    again = raised_in(
        SCRIPT, "try:\n    raise error\nexcept RuntimeError:\n    raise ValueError", error=raised
    )
    assert not is_victim(raised)
    assert not is_victim(again)
    assert classify_failure(raised) == "exception"
    aborted = f"terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  {MISMATCH}\n"
    assert not in_log(aborted)
    lost = f'Traceback (most recent call last):\n  File "{C10D}", line 3, in f\nRuntimeError: {GLOO}\n'
    assert in_log(lost)
    assert in_log(f"caught: {MISMATCH}\n{lost}"), "the last message counts"
    assert mismatch(aborted) == (
        "its collective does not match another rank's (it was sent 12 bytes and expected 4)"
    )
    assert mismatch("Detected mismatch between collectives on ranks. Rank 0 is running") == (
        "its collective does not match another rank's"
    )
    assert mismatch(lost) == ""
