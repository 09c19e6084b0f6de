"""The progress page of a rank: its layout, byte by byte, and how to read it. Pure.

A rank writes the page (`holdfast.protocol.progress_writer`) and its sidecar reads it, both through a mapping
of the same 4096 bytes and without a system call. A sequence counter that is odd while the writer is inside (a
seqlock) reveals a torn read. A writer that dies inside leaves it odd for ever: `read` then returns None and
`read_torn_ok` what is there, marked `torn`. The next writer makes it even again.

Little-endian and aligned, so that each counter is one store. x86 shows the stores of one thread
in order; for machines that do not (arm64), and against a write that begins and ends within a copy,
a reader takes two copies, which must be equal.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

PAGE_BYTES = 4096
VERSION = 3
MAGIC = b"holdfast"
RING = 256  # step times kept; the p99 of fewer is their maximum or close to it
LABEL_BYTES = 64
COPY_MOST_S = 300.0
# The least time that a copy of a large state is taken to need: memory that was never touched, and cores that
# others use. A measured time is better, but the first copy of a generation has none.
COPY_BYTES_S = 1 << 30
# The time of so many snapshots is added to each wait for a copy just in time: for the optimizer to end its
# writes, for memory that is cold, and for the copy itself.
COPIES = 3.0
FLAG_NONFINITE = 1
FLAG_JUMP = 2


class Buffer(Protocol):
    """bytes, a memoryview, or the mmap of a page."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> bytes | bytearray | memoryview: ...


class Phase(IntEnum):
    """What a rank is doing. DATA to OPTIMIZER and TAIL are work of a training loop; all others are not."""

    JOINING = 0
    RESTORING = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    CHECKPOINT = 6
    EVAL = 7
    IDLE = 8
    PAUSED = 9  # declared by the script, for a reason in `pause_label`
    DONE = 10  # the script has ended well, and a copy has the state that it ended with
    TAIL = 11  # after a commit, before the loop asks for the next step
    SNAPSHOT = 12  # Holdfast copies the state: no work of the script's, and no part of a step


class FailKind(IntEnum):
    NONE = 0
    EXCEPTION = 1
    SYSTEM_EXIT = 2
    DISTRIBUTED = 3  # a collective failed: most likely a victim
    BAD_INPUT = 4
    NUMERIC = 5


HEADER = struct.Struct("<8sII")  # magic, version, bytes
SEQ_INDEX = 2  # as 64-bit words: byte 16
IDENTITY_AT = 24
IDENTITY = struct.Struct("<qiiq")  # generation, rank, local_rank, pid
PHASE_AT = IDENTITY_AT + IDENTITY.size
PHASE = struct.Struct("<qqq")  # phase, phase_seq, phase_since_ns
RESUME = struct.Struct("<qqqq")  # and step_started_ns
WRITE_INDEX = (PHASE_AT + RESUME.size) // 8
# ... write_seq, step, steps_done, times_written, loss, grad_norm, samples, tokens, flops, flags,
# position, first_step_s, data_ns, forward_ns: one block, so that a commit is one copy
STEP = struct.Struct("<qqqqqqqqddqqdqqdqq")
OWN = struct.Struct("<qq")  # data_ns, forward_ns
PAUSE_AT = PHASE_AT + STEP.size
OWN_AT = PAUSE_AT - OWN.size
PAUSE = struct.Struct(f"<d{LABEL_BYTES}s")  # limit_s, label
FAIL_AT = PAUSE_AT + PAUSE.size
FAIL = struct.Struct("<qqq")  # failed_ns, kind, code
SNAPSHOT_AT = FAIL_AT + FAIL.size
SNAPSHOT = struct.Struct("<qd")  # step, cost_s
TAIL_AT = SNAPSHOT_AT + SNAPSHOT.size
TAIL = struct.Struct("<q")  # tail_since_ns
STATE_AT = TAIL_AT + TAIL.size
STATE = struct.Struct("<qd")  # bytes of the replicated state, seconds that a copy took before this generation
AMENDED_AT = STATE_AT + STATE.size
AMENDED = struct.Struct("<8q")  # see `Progress`; a step + 1, newest first; 0: none
# Apart from those: a scheduler that is stepped after each commit amends every step.
VOID_AT = AMENDED_AT + AMENDED.size
VOID = struct.Struct("<64q")
WRITTEN_AT = VOID_AT + VOID.size
WRITTEN = struct.Struct("<qq")  # written_ns, and the last committed step at that time
COPYING_AT = WRITTEN_AT + WRITTEN.size
COPYING = struct.Struct("<q")  # phase in which the last copy began
_END = COPYING_AT + COPYING.size
_ALL = struct.Struct(f"<Qqiiqqqqqqqqqddqqdqqdqqd{LABEL_BYTES}sqqqqdqqd8q64qqqq")  # from the sequence on
# Of a copy that is being made: grows with each piece. Outside of the sequence: several threads write it.
COPIED_INDEX = 960 // 8
_RING_AT = 1024
RING_INDEX = _RING_AT // 4
_TAILS_AT = 2048
TAILS_INDEX = _TAILS_AT // 4
_UNCOMMITTED_AT = 3072
UNCOMMITTED_INDEX = _UNCOMMITTED_AT // 4
NO_WRITES = -1.0  # in that ring: of a step in which no optimizer wrote
_OUTSIDE = frozenset(
    {Phase.CHECKPOINT, Phase.EVAL, Phase.IDLE, Phase.DONE, Phase.PAUSED, Phase.SNAPSHOT}
)  # a tail may hold these
_DECLARED = frozenset({Phase.CHECKPOINT, Phase.EVAL, Phase.PAUSED})
_OF_NO_STEP = frozenset({Phase.JOINING, Phase.RESTORING, Phase.IDLE, Phase.DONE})

_TRIES = 200  # a writer is inside for well under 1 us; 200 looks are some 100 us


@dataclass(frozen=True, slots=True)
class Progress:
    """The content of a page at one instant. Times are CLOCK_MONOTONIC of this machine."""

    generation: int
    rank: int
    local_rank: int
    pid: int
    phase: Phase
    phase_seq: int  # phase changes since the last commit
    phase_since_ns: int
    step_started_ns: int  # the last commit, or the end of a later pause
    write_seq: int  # odd: the optimizer is writing the parameters
    step: int  # the last committed
    steps_done: int  # commits in this generation
    times_written: int  # step times ever pushed into the ring
    loss: float  # NaN too when none was given: see flags
    grad_norm: float
    samples: int  # samples, tokens, flops: sums over this generation
    tokens: int
    flops: float
    flags: int
    position: int  # of the data, -1 unknown
    first_step_s: float  # NaN until the first step of this generation is over
    data_ns: int  # until a forward pass, over this generation: no other rank is waited for in it
    forward_ns: int  # the forward passes that a backward pass followed, over this generation
    pause_limit_s: float  # 0: not declared
    pause_label: str
    failed_ns: int  # 0: has not
    fail_kind: FailKind
    fail_code: int
    snapshot_step: int  # -1: none
    snapshot_cost_s: float
    # The commit that a pause, or the end of a loop, came after; 0: it came in a step. Below 0 in a TAIL:
    # minus the time when the script had done its work there, or had not begun; the rest is Holdfast's.
    tail_since_ns: int = 0
    state_bytes: int = 0  # of the replicated state, 0: not known yet
    known_copy_s: float = 0.0  # what a copy took in earlier generations, 0: not known
    torn: bool = False  # read while a write was unfinished: single fields hold, not their relation
    # steps whose state the script changed after the commit: no copy has the change
    late: tuple[int, ...] = ()
    amended: tuple[int, ...] = ()  # the same, where this rank's copies have it
    # When an optimizer had written in the step that is not committed; 0: none has, or another one has still
    # to write. The host cannot know it of a device: then it is 0, too.
    written_ns: int = 0
    copying_in: int = 0  # the phase in which Holdfast's last copy of the state began


def tail_began_ns(found: Progress) -> int:
    """Return when the work after the last commit began; 0 unless the rank is at such work.

    It lasts until the loop asks for the next step: pauses within it, and what follows a loop, are part of it.
    """
    since_ns = max(0, found.tail_since_ns)
    if found.phase is Phase.TAIL:
        return since_ns or found.phase_since_ns
    return since_ns if found.phase in _OUTSIDE else 0


def uncommitted_since_ns(found: Progress) -> int:
    """Return since when the rank has done work without which others may have committed the step; 0 if not.

    That is what follows the optimizer's writes, and a declared pause anywhere in a step.
    """
    declared = is_declared(found)
    if found.phase in _OF_NO_STEP or (found.phase is Phase.SNAPSHOT and not declared) or tail_began_ns(found):
        return 0
    return found.written_ns or (found.phase_since_ns if declared else 0)


def is_declared(found: Progress) -> bool:
    """True in a pause of the script, also while Holdfast copies the state there."""
    return (found.copying_in if found.phase is Phase.SNAPSHOT else found.phase) in _DECLARED


def spoken(phase: Phase) -> str:
    """Return the phase in words for people."""
    return "after commit" if phase is Phase.TAIL else phase.name.lower()


def copy_s(found: Progress) -> float:
    """Return the seconds that a copy of the state takes, within bounds: a page is input, and others wait.

    The longest of what the last copy took, what those of earlier generations took, and what its bytes may
    take.
    """
    by_size_s = max(0, found.state_bytes) / COPY_BYTES_S
    return min(max(0.0, found.snapshot_cost_s, found.known_copy_s, by_size_s), COPY_MOST_S)


def copied(buffer: Buffer) -> int:
    """Return the counter of the pieces copied so far: as long as it moves, a copy is being made."""
    at = COPIED_INDEX * 8
    return int.from_bytes(bytes(buffer[at : at + 8]), "little") if is_page(buffer) else 0


def is_page(buffer: Buffer) -> bool:
    if len(buffer) < PAGE_BYTES:
        return False
    return bool(HEADER.unpack(bytes(buffer[: HEADER.size])) == (MAGIC, VERSION, PAGE_BYTES))


def read(buffer: Buffer) -> Progress | None:
    """Return the content of the page; None if it is no page or a write was never seen finished."""
    found = _consistent(buffer, SEQ_INDEX * 8, _END)
    return None if found is None else _progress(found, torn=False)


def read_torn_ok(buffer: Buffer) -> Progress | None:
    """Do what `read` does, but return what is there, with `torn` set, when its writer stopped inside."""
    if not is_page(buffer):
        return None
    found = _consistent(buffer, SEQ_INDEX * 8, _END)
    if found is not None:
        return _progress(found, torn=False)
    return _progress(bytes(buffer[SEQ_INDEX * 8 : _END]), torn=True)


def step_times_s(buffer: Buffer, last: int = RING) -> tuple[float, ...] | None:
    """Return up to `last` step times in seconds, newest last; None as for `read`."""
    return _ring(buffer, _RING_AT, last)


def tail_times_s(buffer: Buffer, last: int = RING) -> tuple[float, ...] | None:
    """Return how long the work after each of the last commits took, in seconds; None as for `read`.

    The last entry is of a tail that may not be over: then it is an old one, or 0.
    """
    return _ring(buffer, _TAILS_AT, last)


def uncommitted_times_s(buffer: Buffer, last: int = RING) -> tuple[float, ...] | None:
    """Return the times in seconds from an optimizer's writes to the commit, of the last steps that had any.

    None as for `read`.
    """
    found = _ring(buffer, _UNCOMMITTED_AT, last)
    return None if found is None else tuple(each for each in found if each >= 0)


def _ring(buffer: Buffer, at: int, last: int) -> tuple[float, ...] | None:
    found = _consistent(buffer, SEQ_INDEX * 8, at + 4 * RING)
    if found is None:
        return None
    pushed: int = _ALL.unpack_from(found)[12]
    ring = struct.unpack_from(f"<{RING}f", found, at - SEQ_INDEX * 8)
    split = pushed % RING
    ordered = ring[:pushed] if pushed <= RING else ring[split:] + ring[:split]
    return ordered[max(0, len(ordered) - last) :] if last > 0 else ()


def _consistent(buffer: Buffer, start: int, end: int) -> bytes | None:
    if not is_page(buffer):
        return None
    for _ in range(_TRIES):
        first = bytes(buffer[start:end])
        if not first[0] & 1 and first == bytes(buffer[start:end]):
            return first
    return None


def _progress(content: bytes, *, torn: bool) -> Progress | None:
    v = _ALL.unpack_from(content)
    try:
        phase, kind = Phase(v[5]), FailKind(v[26])
    except ValueError:
        return None
    label = v[24].rstrip(b"\0").decode(errors="ignore")
    amended, void = _steps(v[-75:-67]), _steps(v[-67:-3])
    written_ns = v[-3] if v[-2] == v[10] else 0  # of the step in flight
    values = [*v[1:5], phase, *v[6:24], label, v[25], kind, *v[27:-75], torn, void, amended]
    return Progress(*[*values, written_ns, v[-1]])


def _steps(words: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(word - 1 for word in words if word > 0))
