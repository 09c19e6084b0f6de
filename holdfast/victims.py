"""Has a rank failed because another one did, and what did torch say to it? Pure.

Words prove nothing: a store that hangs up on the script says "Connection reset by peer" as well. So it also
counts where the exception was raised: in torch's collectives, in the backward pass that calls them, or, of
what a script calls itself (`work.wait()`), in C++ and with words that only torch has.
"""

from __future__ import annotations

import re
from opcode import opmap
from types import TracebackType

from holdfast.errors import PeerLost

SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket Timeout",
    "Timed out waiting",
    "NCCL",
    "connectFullMesh",
    "recvValue failed",
    "wait timeout",
    "monitoredBarrier",
)
_PLAIN = SIGNS[:6]  # those that say by themselves what happened
_MOST = 80  # characters of what has none of them
_TYPES = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
# Of torch's C++ alone: a library of the script's that loses a connection says nothing of the kind.
_TORCH_SAYS = re.compile(
    r"\bgloo/\w+/|connectFullMesh|ProcessGroup(?:NCCL|Gloo|Wrapper)|NCCL (?:error|WARN)|ncclSystemError"
    r"|ncclRemoteError|ncclUnhandledCudaError|monitoredBarrier|\bDist(?:Backend|Network|Store)Error\b"
)
_COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/distributed.py")
_ENGINE = ("/torch/autograd/", "/torch/_ops.py", "/torch/_functorch/", "/torch/_inductor/", "/torch/_dynamo/")
_FILES = "/torch/distributed/checkpoint/"  # reads and writes, and calls the collectives elsewhere
_RAISE = opmap["RAISE_VARARGS"]
_DEEP = 50  # exceptions within each other: more are not looked at

_TRACEBACK = "Traceback (most recent call last):"
_FROM = "The above exception was the direct cause of the following exception:"
_DIST = re.compile(r"^(?:torch\.distributed\.)?(Dist\w+)", re.MULTILINE)
_TAIL = 20_000  # characters of a log that are looked at
_PREFIX = re.compile(r"^(?:\[rank\d+\]:\s?)?(?:[ |+-]*\| )?", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line \d+.*', re.MULTILINE)


def is_victim(error: BaseException, deep: int = 0) -> bool:
    """Say whether `error` comes from a lost peer, also where the script wrapped that in one of its own."""
    if deep >= _DEEP:
        return False
    cause, context, parts = error.__cause__, error.__context__, getattr(error, "exceptions", None)
    if cause is not None and is_victim(cause, deep + 1):
        return True
    if isinstance(parts, tuple) and parts:  # of an exception group
        return all(isinstance(each, BaseException) and is_victim(each, deep + 1) for each in parts)
    if isinstance(error, PeerLost) or any(_is_torchs(each) for each in type(error).__mro__):
        return True
    text = str(error)
    if not _has_sign(text):
        return False
    if context is not None and is_victim(context, deep + 1):  # without `from`, but with its words
        return True
    return isinstance(error, RuntimeError) and _is_raised_by_torch(error.__traceback__, text)


def in_log(log: str) -> bool:
    """Say the same of a process that said nothing else, by the end of its log."""
    text = _PREFIX.sub("", log[-_TAIL:])
    *before, last = text.split(_TRACEBACK)
    while not _is_of_peers(last):
        if not before or not before[-1].rstrip().endswith(_FROM):
            return False
        last = before.pop()
    return True


def lost_peers(text: str) -> str:
    """Return "lost its peers" with the reason that the last line of an exception's `text` gives.

    Where in the library that was, with which port, and what torch supposes are left out: the record of the
    incident has the whole text.
    """
    lines = text.strip().splitlines()
    reason = next((sign.lower() for sign in _PLAIN if sign in text), lines[-1] if lines else "")
    return "lost its peers" + (f" ({reason[:_MOST]})" if reason else "")


def _is_torchs(kind: type) -> bool:
    return kind.__name__ in _TYPES and str(kind.__module__).startswith("torch")


def _has_sign(text: str) -> bool:
    return any(sign in text for sign in SIGNS) or _TORCH_SAYS.search(text) is not None


def _is_raised_by_torch(trace: TracebackType | None, text: str) -> bool:
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    if code.co_code[trace.tb_lasti] == _RAISE:  # else it came out of C++
        return _is_in(code.co_filename, _COLLECTIVES)
    return _TORCH_SAYS.search(text) is not None or _is_in(code.co_filename, _COLLECTIVES + _ENGINE)


def _is_in(file: str, places: tuple[str, ...]) -> bool:
    return any(each in file for each in places) and _FILES not in file


def _is_of_peers(text: str) -> bool:
    """Say it of one traceback, or of what a library printed before it aborted the process."""
    frames = list(_FRAME.finditer(text))
    if not frames:
        return _TORCH_SAYS.search(text) is not None
    file, said = frames[-1]["file"], text[frames[-1].end() :]
    if _TYPES & set(_DIST.findall(said)):
        return True
    if said.lstrip().startswith("raise "):
        return _is_in(file, _COLLECTIVES) and _has_sign(said)
    known = _is_in(file, _COLLECTIVES + _ENGINE) and _has_sign(said)
    return known or _TORCH_SAYS.search(said) is not None
