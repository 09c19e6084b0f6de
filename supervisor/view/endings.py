"""Classify how a rank's process ended, as a kind of fault, a signature and a description. Pure.

When a rank dies, the others fail within milliseconds in the collective that it never joined. Their tracebacks
are long and do not show the cause, so a rank that failed in a collective is treated as a victim.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from holdfast.inspection import tracebacks, victims
from holdfast.inspection.victims import mismatch
from holdfast.protocol import foreign_text
from holdfast.protocol.launcher_messages import DISTRIBUTED, OUT_OF_MEMORY, Ending
from supervisor.fault_kinds import FaultName

SYSTEM_EXIT = "system_exit"
SIGABRT = 6  # raised by a C++ program that does not catch an exception

_LAST_WORDS_CHARS = 300  # the maximum length of a quoted line that names an exception
_EXIT_MESSAGE_BYTES = 1000  # the maximum length of the quoted text that was passed to `sys.exit`
_NAMES = (  # signal(7), on x86 and ARM
    "HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT"
    " STOP TSTP TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS"
)
_SIGNALS = {number: f"SIG{name}" for number, name in enumerate(_NAMES.split(), 1)}

_RAISED = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?::\s|:?$)", re.MULTILINE)


_KINDS: Mapping[str, FaultName] = MappingProxyType(  # key: the failure that the process reported
    {SYSTEM_EXIT: "exit", "bad_input": "bad_input", "exception": "exception"}
)


def kind_of_fault(ending: Ending) -> FaultName:
    """Return the kind of fault of a process that failed in this way."""
    if is_victim(ending):
        return "victim"
    return _KINDS.get(ending.fail, "crash") if ending.signal is None else "crash"


def is_victim(ending: Ending) -> bool:
    """True if the rank's report or the end of its log shows that it failed because another rank did."""
    if ending.signal not in (None, SIGABRT) or ending.fail:
        return ending.fail == DISTRIBUTED
    return victims.in_log(ending.message)


def signature(ending: Ending) -> str:
    """Return a text that is the same whenever this failure recurs.

    It contains no PIDs, times or addresses.
    """
    if ending.signal is not None:
        return OUT_OF_MEMORY if is_out_of_memory(ending) else f"signal {ending.signal}"
    if ending.fail == SYSTEM_EXIT:
        return f"{SYSTEM_EXIT} {ending.code}"
    kind = ending.fail or "exit"
    text = _last_traceback(ending.message)
    frames = list(tracebacks.FRAME.finditer(text))
    if not frames:  # without a traceback, any log line can look like the name of an exception
        return f"{kind} {ending.code}"
    raised = _RAISED.search(text, frames[-1].end())
    name = raised["name"] if raised is not None else "unknown"
    return f"{kind} {name} at {frames[-1]['file']}:{frames[-1]['line']}"


def exception_in(found: str) -> str:
    """Return the name of the exception in its `signature`; "" or a number if it names none."""
    return "".join(found.split(" ")[1:2])


def describe(ending: Ending) -> str:
    """Describe how a process ended, for example "raised ValueError: no" or "was killed by SIGSEGV"."""
    if ending.signal is not None:
        named = _SIGNALS.get(ending.signal, f"signal {ending.signal}")
        # A report may say that memory ran out without a message.
        reason = ending.message.splitlines()[:1] if is_out_of_memory(ending) else []
        why = f": {reason[0]}" if reason else ""
        differs = mismatch(ending.message) if ending.signal == SIGABRT else ""
        why = why or (f": {differs}" if differs else "")
        return f"was killed by {named}{why}"
    if ending.fail == SYSTEM_EXIT:
        text = foreign_text.shortened(ending.message, _EXIT_MESSAGE_BYTES)
        return f"exited with code {ending.code}" + (f" ({text})" if text else "")
    if ending.fail in ("exception", DISTRIBUTED, "bad_input", "numeric"):
        last = ending.message.strip().splitlines()[-1:] or ["an exception"]
        return f"raised {ending.raised or last[0][:200]}"
    return f"exited with code {ending.code}"


def last_words(ending: Ending) -> str:
    """Return one line that says why a process ended, such as "ValueError: no"; "" if that is unknown.

    An exception is found even if the log continues after its traceback.
    """
    if ending.signal is not None:
        return f"it {describe(ending)}"
    if ending.fail == SYSTEM_EXIT:
        return f"it exited with code {ending.code}"
    text = ending.raised or _exception_line(ending.message)
    if not text and ending.fail == "bad_input":
        text = next((line for line in reversed(ending.message.splitlines()) if line.strip()), "")
    return foreign_text.harmless(text.strip(), colour=False)[:_LAST_WORDS_CHARS]


def _exception_line(message: str) -> str:
    """Return the line that names the exception of the last traceback; "" if there is no traceback."""
    text = _last_traceback(message)
    frames = list(tracebacks.FRAME.finditer(text))
    raised = _RAISED.search(text, frames[-1].end()) if frames else None
    return text[raised.start() :].partition("\n")[0] if raised is not None else ""


def is_out_of_memory(ending: Ending) -> bool:
    """True if the kernel killed the process for lack of memory.

    The journals and launchers of earlier versions report this only at the beginning of the message.
    """
    return ending.out_of_memory or ending.message.startswith(f"{OUT_OF_MEMORY}: ")


def _last_traceback(message: str) -> str:
    """Return the message from its last traceback to its end; the whole message if it has no traceback."""
    return tracebacks.end_of_log(message).rpartition(tracebacks.HEADER)[2]
