"""Define the phases and the byte layout of a rank's progress page, and read the page. Pure.

A rank writes the page (`holdfast.protocol.progress_writer`) and its sidecar reads it. Both map the same 4096
bytes, so neither needs a system call. A sequence counter in the page is odd during a write (a seqlock), which
lets readers detect torn reads. If a writer dies during a write, the counter stays odd. `read` then returns
None, and `read_torn_ok` returns the current content marked as `torn`. The next writer makes the counter even
again.

The page is little-endian and aligned, so a single store updates each counter. The counter alone does not
reveal a write that begins and ends while a reader copies the page. Nor is it enough on machines such as arm64
where, unlike on x86, one thread's stores may become visible out of order. A reader therefore makes two copies
and accepts them only if they match.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from types import MappingProxyType
from typing import Protocol

PAGE_BYTES = 4096
VERSION = 3
MAGIC = b"holdfast"
RING = 256  # the number of step times that are kept; the p99 of fewer values is about their maximum
LABEL_BYTES = 64
COPY_MOST_S = 300.0  # the upper bound on the expected duration of a copy of the state
# The assumed speed of copying a large state into new memory while other processes also use the cores. A
# measured time is better, but none is available before the first copy of a generation.
COPY_BYTES_S = 1 << 30
# Each wait for a just-in-time copy is extended by the duration of this many snapshots. This gives the
# optimizer time to finish its writes, and allows for a copy into cold memory.
COPIES = 3.0
FLAG_NONFINITE = 1
FLAG_JUMP = 2


class Buffer(Protocol):
    """bytes, a memoryview, or the mmap of a page."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> bytes | bytearray | memoryview: ...


class Phase(IntEnum):
    """The activity of a rank, stored as a number in its page. `PHASES` describes each phase."""

    JOINING = 0
    RESTORING = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    CHECKPOINT = 6
    EVAL = 7
    IDLE = 8
    PAUSED = 9
    DONE = 10
    TAIL = 11
    SNAPSHOT = 12


class PhaseKind(Enum):
    """The part of a generation that a phase belongs to."""

    START = "start"  # the start of a generation, before the loop
    STEP = "step"
    TAIL = "tail"  # a step's tail: the script's work after the commit, until the loop requests the next step
    PAUSE = "pause"  # work that the script declares, with a label
    END = "end"  # outside of any loop
    COPY = "copy"  # Holdfast's own work, which is not part of a step


@dataclass(frozen=True, slots=True)
class PhaseMeaning:
    """The meaning of a phase."""

    kind: PhaseKind
    words: str  # the phase in words, for display
    doing: str = ""  # completes "rank 1 is ...", or for a pause "rank 1 is in ... that the script declared"
    may_wait: bool = False  # whether a rank without progress in this phase may be waiting for a late rank
    label: str = ""  # the label that the script gives this pause; PAUSED is for all other labels


# The meaning of each phase. Messages, the journal and status.json refer to a phase by its name (`name_of`).
PHASES: Mapping[Phase, PhaseMeaning] = MappingProxyType(
    {
        Phase.JOINING: PhaseMeaning(PhaseKind.START, "joining", "joining the group", may_wait=True),
        Phase.RESTORING: PhaseMeaning(PhaseKind.START, "restoring", "restoring its state", may_wait=True),
        Phase.DATA: PhaseMeaning(PhaseKind.STEP, "data", may_wait=True),
        Phase.FORWARD: PhaseMeaning(PhaseKind.STEP, "forward", may_wait=True),
        Phase.BACKWARD: PhaseMeaning(PhaseKind.STEP, "backward", may_wait=True),
        Phase.OPTIMIZER: PhaseMeaning(PhaseKind.STEP, "optimizer"),
        Phase.TAIL: PhaseMeaning(PhaseKind.TAIL, "after commit"),
        Phase.EVAL: PhaseMeaning(PhaseKind.PAUSE, "eval", "an evaluation", label="eval"),
        Phase.CHECKPOINT: PhaseMeaning(
            PhaseKind.PAUSE, "checkpoint", "a checkpoint of its own", label="checkpoint"
        ),
        Phase.PAUSED: PhaseMeaning(PhaseKind.PAUSE, "paused", "a pause"),
        Phase.SNAPSHOT: PhaseMeaning(PhaseKind.COPY, "snapshot"),
        Phase.IDLE: PhaseMeaning(PhaseKind.END, "idle"),
        # The script has succeeded, and a copy contains its final state.
        Phase.DONE: PhaseMeaning(PhaseKind.END, "done"),
    }
)
NOT_BEGUN = "starting"  # used instead of a phase's name for a released process that has no page yet


class FailKind(IntEnum):
    NONE = 0
    EXCEPTION = 1
    SYSTEM_EXIT = 2
    DISTRIBUTED = 3  # a collective failed, most likely because of another rank's failure
    BAD_INPUT = 4
    NUMERIC = 5


HEADER = struct.Struct("<8sII")  # magic, version, bytes
SEQ_INDEX = 2  # an index of 64-bit words: byte 16
IDENTITY_AT = 24
IDENTITY = struct.Struct("<qiiq")  # generation, rank, local_rank, pid
PHASE_AT = IDENTITY_AT + IDENTITY.size
PHASE = struct.Struct("<qqq")  # phase, phase_seq, phase_since_ns
RESUME = struct.Struct("<qqqq")  # the same, and step_started_ns
WRITE_INDEX = (PHASE_AT + RESUME.size) // 8
# After RESUME: write_seq, step, steps_done, times_written, loss, grad_norm, samples, tokens, flops, flags,
# position, first_step_s, data_ns, forward_ns. They are contiguous, so a commit is one copy.
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
# The size of the replicated state in bytes, and how many seconds a copy took before this generation.
STATE = struct.Struct("<qd")
AMENDED_AT = STATE_AT + STATE.size
AMENDED = struct.Struct("<8q")  # see `Progress`; each is a step + 1, newest first, or 0 for none
# The void steps are separate from the amended ones, because a scheduler that is stepped after each commit
# amends every step, and would otherwise displace them.
VOID_AT = AMENDED_AT + AMENDED.size
VOID = struct.Struct("<64q")
MAX_AMENDED, MAX_VOID = AMENDED.size // 8, VOID.size // 8
WRITTEN_AT = VOID_AT + VOID.size
WRITTEN = struct.Struct("<qq")  # written_ns, and the last committed step at that time
COPYING_AT = WRITTEN_AT + WRITTEN.size
COPYING = struct.Struct("<q")  # the phase when the last copy began
_END = COPYING_AT + COPYING.size
# from the sequence counter on
_ALL = struct.Struct(f"<Qqiiqqqqqqqqqddqqdqqdqqd{LABEL_BYTES}sqqqqdqqd8q64qqqq")
# A counter that grows with each piece of a copy in progress. The sequence counter does not protect it,
# because more than one thread writes it.
COPIED_INDEX = 960 // 8
_RING_AT = 1024
RING_INDEX = _RING_AT // 4
_TAILS_AT = 2048
TAILS_INDEX = _TAILS_AT // 4
_UNCOMMITTED_AT = 3072
UNCOMMITTED_INDEX = _UNCOMMITTED_AT // 4
NO_WRITES = -1.0  # the entry in the ring of uncommitted times for a step without optimizer writes

_TRIES = 200  # a write takes well under 1 us; 200 reads take some 100 us


@dataclass(frozen=True, slots=True)
class Progress:
    """The content of a page at one instant. Times are on CLOCK_MONOTONIC of this machine."""

    generation: int
    rank: int
    local_rank: int
    pid: int
    phase: Phase
    phase_seq: int  # phase changes since the last commit
    phase_since_ns: int
    step_started_ns: int  # when the last commit, or a later pause, ended
    write_seq: int  # odd while the optimizer is writing the parameters
    step: int  # the last committed step
    steps_done: int  # the number of commits in this generation
    times_written: int  # the number of step times ever written to the ring
    loss: float  # NaN if the script passed none, or if the loss is NaN; `flags` distinguishes them
    grad_norm: float
    samples: int  # samples, tokens and flops are sums over this generation
    tokens: int
    flops: float
    flags: int
    position: int  # the position in the data; -1 if unknown
    first_step_s: float  # NaN until the first step of this generation ends
    # The total time before forward passes in this generation, without any time when the rank may have waited
    # for other ranks.
    data_ns: int
    forward_ns: int  # the total time of those forward passes in this generation that a backward pass followed
    pause_limit_s: float  # 0 if not declared
    pause_label: str
    failed_ns: int  # 0 if the rank has not failed
    fail_kind: FailKind
    fail_code: int
    snapshot_step: int  # -1: none
    snapshot_cost_s: float
    # The time of the commit before a pause or the end of a loop; 0 if the pause began within a step. In a
    # TAIL, a negative value means that Holdfast, not the script, is working. It is then minus the time of the
    # commit if the script's work has not begun, or minus the time when that work ended.
    tail_since_ns: int = 0
    state_bytes: int = 0  # the size of the replicated state; 0 if not known yet
    known_copy_s: float = 0.0  # the duration of a copy in earlier generations; 0 if not known
    # Whether the page was read during an unfinished write. Each field is then valid, but different fields may
    # not match.
    torn: bool = False
    # The steps whose state the script changed after the commit, if no copy contains the change.
    late: tuple[int, ...] = ()
    amended: tuple[int, ...] = ()  # the same, if this rank's copies contain the change
    # When an optimizer finished writing in the uncommitted step. 0 if none has, if another optimizer has yet
    # to write, or if the optimizer runs on a device, because the host does not know when the device finishes.
    written_ns: int = 0
    copying_in: int = 0  # the phase when Holdfast's last copy of the state began


def of_kinds(*kinds: PhaseKind) -> frozenset[Phase]:
    """Return all phases of these kinds."""
    return frozenset(phase for phase, meaning in PHASES.items() if meaning.kind in kinds)


def names_of_kinds(*kinds: PhaseKind) -> frozenset[str]:
    """Return the names of the phases of these kinds."""
    return frozenset(map(name_of, of_kinds(*kinds)))


def name_of(phase: Phase) -> str:
    """Return the name that messages, the journal and status.json use for a phase."""
    return phase.name.lower()


def meaning_of(name: str) -> PhaseMeaning | None:
    """Return the meaning of the phase called `name`; None if there is no such phase, as for `NOT_BEGUN`."""
    return _BY_NAME.get(name)


def words_of(name: str) -> str:
    """Return the phase called `name` in words, for display; `name` itself if there is no such phase."""
    meaning = _BY_NAME.get(name)
    return meaning.words if meaning is not None else name


def pause_phase(label: str) -> Phase:
    """Return the phase of a pause that a script declares with `label`."""
    return _BY_LABEL.get(label, Phase.PAUSED)


_BY_NAME: Mapping[str, PhaseMeaning] = {name_of(phase): meaning for phase, meaning in PHASES.items()}
_BY_LABEL: Mapping[str, Phase] = {meaning.label: phase for phase, meaning in PHASES.items() if meaning.label}
_DECLARED = of_kinds(PhaseKind.PAUSE)
_WITHIN_TAIL = of_kinds(PhaseKind.PAUSE, PhaseKind.END, PhaseKind.COPY)  # the phases that a tail may contain
_OF_NO_STEP = of_kinds(PhaseKind.START, PhaseKind.END)


def tail_began_ns(found: Progress) -> int:
    """Return when the work after the last commit began, or 0 if the rank is not doing such work.

    This work lasts until the loop requests the next step. It includes any pauses during the work, and work
    after a loop.
    """
    since_ns = max(0, found.tail_since_ns)
    if found.phase is Phase.TAIL:
        return since_ns or found.phase_since_ns
    return since_ns if found.phase in _WITHIN_TAIL else 0


def uncommitted_since_ns(found: Progress) -> int:
    """Return when the rank began work within a step that other ranks do not need for their commit.

    Such work follows the optimizer's writes, or is in a declared pause anywhere in the step. The result is 0
    if the rank is not doing such work.
    """
    declared = is_declared(found)
    if found.phase in _OF_NO_STEP or (found.phase is Phase.SNAPSHOT and not declared) or tail_began_ns(found):
        return 0
    return found.written_ns or (found.phase_since_ns if declared else 0)


def is_declared(found: Progress) -> bool:
    """Return True during a pause that the script declared, even while Holdfast copies the state within it."""
    return (found.copying_in if found.phase is Phase.SNAPSHOT else found.phase) in _DECLARED


def copy_s(found: Progress) -> float:
    """Return the expected duration of a copy of the state, at most `COPY_MOST_S`.

    The result is the maximum of three values: the measured duration of the last copy, the duration of copies
    in earlier generations, and an estimate from the state's size. It is bounded because a page is untrusted
    input and because other ranks wait that long.
    """
    by_size_s = max(0, found.state_bytes) / COPY_BYTES_S
    return min(max(0.0, found.snapshot_cost_s, found.known_copy_s, by_size_s), COPY_MOST_S)


def copied(buffer: Buffer) -> int:
    """Return the number of pieces copied so far; while it increases, a copy is in progress."""
    at = COPIED_INDEX * 8
    return int.from_bytes(bytes(buffer[at : at + 8]), "little") if is_page(buffer) else 0


def is_page(buffer: Buffer) -> bool:
    if len(buffer) < PAGE_BYTES:
        return False
    return bool(HEADER.unpack(bytes(buffer[: HEADER.size])) == (MAGIC, VERSION, PAGE_BYTES))


def read(buffer: Buffer) -> Progress | None:
    """Return the content of the page; None if it is not a page, or if a write did not finish in time."""
    found = _consistent(buffer, SEQ_INDEX * 8, _END)
    return None if found is None else _progress(found, torn=False)


def read_torn_ok(buffer: Buffer) -> Progress | None:
    """Return the same as `read`, except that a write that does not finish yields content marked as `torn`."""
    if not is_page(buffer):
        return None
    found = _consistent(buffer, SEQ_INDEX * 8, _END)
    if found is not None:
        return _progress(found, torn=False)
    return _progress(bytes(buffer[SEQ_INDEX * 8 : _END]), torn=True)


def step_times_s(buffer: Buffer, last: int = RING) -> tuple[float, ...] | None:
    """Return up to `last` step times in seconds, newest last. Returns None in the same cases as `read`."""
    return _ring(buffer, _RING_AT, last)


def tail_times_s(buffer: Buffer, last: int = RING) -> tuple[float, ...] | None:
    """Return the durations, in seconds, of the work after each of the last commits.

    If the last tail is unfinished, its entry is an earlier value or 0. Returns None in the same cases as
    `read`.
    """
    return _ring(buffer, _TAILS_AT, last)


def uncommitted_times_s(buffer: Buffer, last: int = RING) -> tuple[float, ...] | None:
    """Return the seconds from an optimizer's writes to the commit, for the last steps with such writes.

    Returns None in the same cases as `read`.
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
    written_ns = v[-3] if v[-2] == v[10] else 0  # valid only if it belongs to the uncommitted step
    values = [*v[1:5], phase, *v[6:24], label, v[25], kind, *v[27:-75], torn, void, amended]
    return Progress(*[*values, written_ns, v[-1]])


def _steps(words: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(word - 1 for word in words if word > 0))
