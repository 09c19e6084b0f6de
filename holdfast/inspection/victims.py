"""Decide whether a rank failed because another rank did, and extract torch's report of it. Pure.

Most error texts are ambiguous. For example, "Connection reset by peer" may also mean that a database closed
the script's connection. Such a text is therefore accepted as a sign only if torch's collectives, or the
backward pass that calls them, raised it. A text that names a location in torch's C++ code always comes from
torch, even if other code repeats it.

In case of doubt, a rank is treated as a victim. The supervisor then waits briefly for the cause to appear. If
none does, it restarts the rank a few times and shows its traceback. The opposite mistake is worse: blaming a
victim could end a run that has only lost a peer.
"""

from __future__ import annotations

import re
from opcode import opmap
from types import TracebackType

from holdfast.errors import BadInput, PeerLost, members_of_group
from holdfast.inspection import tracebacks

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
_PLAIN = SIGNS[:6]  # the signs that are enough to explain the failure to a reader
_MOST = 80  # the maximum number of characters to show of a text without one of these signs
_TYPES = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
# Texts that only torch's C++ code uses. Other libraries do not report a lost connection in these words.
_TORCH_SAYS = re.compile(
    r"\bgloo/\w+/|connectFullMesh|ProcessGroup(?:NCCL|Gloo|Wrapper)|NCCL (?:error|WARN)|ncclSystemError"
    r"|ncclRemoteError|ncclUnhandledCudaError|monitoredBarrier|\bDist(?:Backend|Network|Store)Error\b"
)
# Locations in torch's C++ code that fail because of a peer. A text that names such a location comes from
# torch, no matter what code raised the exception.
_PLACE = re.compile(
    r"\b(?:gloo|tensorpipe)/[\w/]+\.\w+:\d+|ProcessGroup\w+\.[ch]pp:\d+|failed to pass monitoredBarrier"
)
# Reports from torch's C++ code that two ranks called different collectives. In this case, the script is wrong
# and no peer was lost. The rank that reports the mismatch is the cause, and the other ranks lose it as a
# peer.
_MISMATCH = re.compile(
    r"op\.preamble\.length <= op\.nbytes|Is there a distributed collective mismatch"
    r"|Detected mismatch between collectives on ranks"
)
_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_COLLECTIVES = ("torch.distributed", "torch.nn.parallel.distributed")  # these modules and their submodules
_ENGINE = ("torch.autograd", "torch._ops", "torch._functorch", "torch._inductor", "torch._dynamo")
# Submodules that contain no collectives: `checkpoint` reads and writes files, and `rpc` forwards exceptions
# that a function of the script raised on another rank. The collectives that both call are in other modules.
_OTHERS = ("torch.distributed.checkpoint", "torch.distributed.rpc")
_RAISE = opmap["RAISE_VARARGS"]
_DEEP = 50  # the maximum number of exceptions of a chain that are examined
_NESTED = 10  # the maximum number of levels of nested exception groups that are examined

_LINKS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
# faulthandler prints this, followed by the stacks of all threads. It prints no exception.
_DUMP = "Fatal Python error: "
_DIST = re.compile(r"^(?:torch\.distributed\.)?(Dist\w+)", re.MULTILINE)


def is_victim(error: BaseException, nested: int = 0) -> bool:
    """Return True if `error` comes from a lost peer, or was raised while the script handled such an error.

    The second case includes `raise Failed("step") from error`, the same without `from`, `sys.exit(1)`, and
    failures in `finally` blocks: none of them would have happened without the lost peer.
    """
    chain = [error]
    for each in chain:
        if _is_mismatch(each):
            return False
        if _is_loss(each, nested):
            return True
        for other in (each.__cause__, each.__context__):
            if other is not None and len(chain) < _DEEP and not any(other is known for known in chain):
                chain.append(other)
    return False


def in_log(log: str) -> bool:
    """Decide as `is_victim` does, from the end of the `log` of a process that reported no exception."""
    text = tracebacks.end_of_log(log)
    if _MISMATCH.search(text.rpartition(tracebacks.HEADER)[2]) is not None:
        return False
    before_dump, dump, stacks = text.rpartition(_DUMP)
    if dump and tracebacks.HEADER not in stacks:
        text = before_dump
    *before, last = text.split(tracebacks.HEADER)
    while not _is_of_peers(last):
        if not before or not before[-1].rstrip().endswith(_LINKS):
            return False
        last = before.pop()
    return True


def mismatch(text: str) -> str:
    """Return, as one clause, what torch reports in `text` about mismatched collectives; "" if nothing."""
    if _MISMATCH.search(text) is None:
        return ""
    sizes = _SIZES.search(text)
    detail = f" (it was sent {sizes[1]} bytes and expected {sizes[2]})" if sizes is not None else ""
    return f"its collective does not match another rank's{detail}"


def lost_peers(text: str) -> str:
    """Return "lost its peers" with the reason that an exception's `text` gives.

    The location in the library, the port, and torch's suggestions are omitted, because the record of the
    incident contains the whole text.
    """
    lines = text.strip().splitlines()
    reason = next((sign.lower() for sign in _PLAIN if sign in text), lines[-1] if lines else "")
    return "lost its peers" + (f" ({reason[:_MOST]})" if reason else "")


def _is_loss(error: BaseException, nested: int) -> bool:
    if isinstance(error, PeerLost):
        return True
    if isinstance(error, BadInput):  # even if its message quotes the text of a lost peer
        return False
    parts = members_of_group(error)
    if parts:
        return nested < _NESTED and all(is_victim(each, nested + 1) for each in parts)
    if any(_is_torch_type(each) for each in type(error).__mro__):
        return True
    try:
        text = str(error)
    except Exception:  # the script's own class may raise anything here
        return False
    if _PLACE.search(text) is not None:
        return True
    return isinstance(error, RuntimeError) and _is_raised_by_torch(error.__traceback__, text)


def _is_mismatch(error: BaseException) -> bool:
    try:
        return isinstance(error, RuntimeError) and _MISMATCH.search(str(error)) is not None
    except Exception:  # the script's own class may raise anything here
        return False


def _is_torch_type(kind: type) -> bool:
    return kind.__name__ in _TYPES and str(kind.__module__).startswith("torch")


def _is_raised_by_torch(trace: TracebackType | None, text: str) -> bool:
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__"))
    if trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE:  # otherwise C++ code raised it
        return _is_in(module, _COLLECTIVES) and _has_sign(text)
    known = _is_in(module, _COLLECTIVES + _ENGINE) and _has_sign(text)
    return known or _TORCH_SAYS.search(text) is not None


def _has_sign(text: str) -> bool:
    return any(sign in text for sign in SIGNS)


def _is_in(module: str, places: tuple[str, ...]) -> bool:
    return _is_of(module, places) and not _is_of(module, _OTHERS)


def _is_of(module: str, places: tuple[str, ...]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in places)


def _is_of_peers(text: str) -> bool:
    """Return True if a lost peer caused `text`, a traceback or the output of a library before it aborted."""
    frames = list(tracebacks.FRAME.finditer(text))
    if not frames:
        return _TORCH_SAYS.search(text) is not None or _PLACE.search(text) is not None
    after = text[frames[-1].end() :]
    if _PLACE.search(after) is not None or _TYPES & set(_DIST.findall(after)):
        return True
    module = _module(frames[-1]["file"])
    if after.lstrip().startswith("raise "):
        return _is_in(module, _COLLECTIVES) and _has_sign(after)
    known = _is_in(module, _COLLECTIVES + _ENGINE) and _has_sign(after)
    return known or _TORCH_SAYS.search(after) is not None


def _module(file: str) -> str:
    """Return the name of torch's module in `file`; "" for other files. A log contains only file names."""
    _, found, inner = f"/{file}".rpartition("/torch/")
    return "torch." + inner.removesuffix(".py").replace("/", ".") if found else ""
