"""Create and write the progress page of a rank. `holdfast.protocol.progress` reads it.

Each method that a training step calls packs its values first, then copies them in one piece while the
sequence counter is odd. So no exception can interrupt a write, and the page is busy for less than a
microsecond.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from holdfast.fileio import folder_rights
from holdfast.protocol import kept_steps
from holdfast.protocol import progress as layout
from holdfast.protocol.progress import Phase, PhaseKind

_Sums: TypeAlias = "tuple[int, int, int, int, float]"
# Returns CLOCK_MONOTONIC in nanoseconds, the clock that the reader uses too.
NanosecondClock: TypeAlias = Callable[[], int]

# Every step uses these, because plain integers are faster than enum members.
_RESTORING, _DATA, _OPTIMIZER = int(Phase.RESTORING), int(Phase.DATA), int(Phase.OPTIMIZER)
_FORWARD, _BACKWARD, _TAIL = int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.TAIL)
_SNAPSHOT, _COPY_LABEL = int(Phase.SNAPSHOT), layout.name_of(Phase.SNAPSHOT).encode()
_WORK = layout.of_kinds(PhaseKind.STEP, PhaseKind.TAIL)
_pack_phase, _pack_step = layout.PHASE.pack, layout.STEP.pack
_SEQ, _RING, _RING_AT, _TAILS_AT = layout.SEQ_INDEX, layout.RING, layout.RING_INDEX, layout.TAILS_INDEX
_UNCOMMITTED_AT, _NO_WRITES = layout.UNCOMMITTED_INDEX, layout.NO_WRITES
_PHASE_AT, _PAUSE_AT = layout.PHASE_AT, layout.PAUSE_AT
_PHASE_END, _PAUSE_END = _PHASE_AT + layout.PHASE.size, _PAUSE_AT + layout.PAUSE.size


class Page:
    """A page that is open for writing. Only one process writes to it, possibly from several threads."""

    def __init__(self, memory: mmap.mmap, clock: NanosecondClock = time.monotonic_ns) -> None:
        self.memory = memory
        self._clock = clock
        self._bytes = memoryview(memory)
        self._words = self._bytes.cast("Q")
        self._times = self._bytes.cast("f")
        # Reentrant, because a signal handler may run while the same thread is writing.
        self._lock = threading.RLock()
        # The methods that run in each step call these two and inline `_store`, which is 0.1 us faster than
        # `with`. They acquire the lock inside the `try`, so that it is released even if an interrupt arrives
        # immediately after the acquisition.
        self._acquire, self._release = self._lock.acquire, self._lock.release
        old = layout.STEP.unpack_from(memory, _PHASE_AT)
        self._working = old[0] in _WORK
        self._phase, self._phase_seq, self._started_ns = old[0], old[1], old[3]
        self._write_seq, self._step = old[4:6]
        # The numbers of commits, step times ever written, samples, tokens and flops. All of them change in
        # each step, and five attributes would take 0.2 us longer than one tuple.
        self._sums: _Sums = old[6:8] + old[10:13]
        self._first_step_s = old[15]
        self._data_ns, self._forward_ns = old[16:18]
        self._since_ns = old[2]  # when the phase began, plus the duration of the snapshots taken during it
        self._carried_ns = 0  # the time of the uncommitted step before its pauses
        self._before_copy = (b"", b"")  # the phase and the pause that a copy has suspended
        self._copying_ns = 0  # when the copy in progress started; 0 if there is none
        self._tail_ns = layout.TAIL.unpack_from(memory, layout.TAIL_AT)[0]  # the value in the page
        self._written_ns = 0  # when an optimizer finished writing in the uncommitted step; 0 if none has

    @classmethod
    def create(cls, path: Path, clock: NanosecondClock = time.monotonic_ns) -> Page:
        """Create a new page at `path`. If one already exists, its readers keep the old page.

        If this raises `OSError`, `path` is unchanged.
        """
        make(path)
        page = cls.attach(path, clock)
        page.begin(0, -1, -1, 0, -1)
        return page

    @classmethod
    def attach(cls, path: Path, clock: NanosecondClock = time.monotonic_ns) -> Page:
        """Open an existing page to continue from its current content.

        Raises `OSError`, or `ValueError` if it is not a page of this version.
        """
        return cls(map_writable(path), clock)

    @property
    def step(self) -> int:
        """The last committed step."""
        return int(self._step)

    @property
    def place(self) -> tuple[int, int, int]:
        """The step, the phase, and the number of phase changes. They change whenever the script advances."""
        return self._step, self._phase, self._phase_seq

    def close(self) -> None:
        for view in (self._times, self._words, self._bytes):
            view.release()
        self.memory.close()

    def begin(self, generation: int, rank: int, local_rank: int, pid: int, step: int) -> None:
        """Start a generation that resumes from `step`.

        Only the step times of the previous generation are kept.
        """
        now_ns = self._clock()
        with self._lock:
            self._working, self._phase, self._phase_seq = False, 0, 0
            self._started_ns, self._carried_ns, self._write_seq, self._tail_ns = now_ns, 0, 0, 0
            self._written_ns = 0
            self._step, self._first_step_s = step, math.nan
            self._data_ns, self._forward_ns = 0, 0
            self._sums = (0, self._sums[1], 0, 0, 0.0)
            content = (
                layout.IDENTITY.pack(generation, rank, local_rank, pid)
                + self._empty_step()
                + layout.PAUSE.pack(0.0, b"")
                + layout.FAIL.pack(0, 0, 0)
                + layout.SNAPSHOT.pack(-1, 0.0)
                + layout.TAIL.pack(0)
                + layout.STATE.pack(0, 0.0)
                + bytes(layout.AMENDED.size + layout.VOID.size + layout.WRITTEN.size + layout.COPYING.size)
            )
            self._store(layout.IDENTITY_AT, content)

    def phase(self, phase: int) -> None:
        """Enter a phase. The step's clock runs only from DATA to OPTIMIZER.

        The phases FORWARD to OPTIMIZER are ignored during a pause or a TAIL, because an evaluation of the
        model calls the same hooks as training. Any other phase, or a commit, ends the pause. Only a commit
        begins a TAIL, and DATA ends it. After a pause within a TAIL, the TAIL continues.

        The time in DATA counts as the rank's own time if FORWARD follows, and the time in FORWARD if BACKWARD
        follows. If another phase follows, the rank may have waited for other ranks in a backward pass that no
        hook reported.
        """
        now_ns = self._clock()
        try:
            self._acquire()
            if not self._working or not _DATA <= phase <= _OPTIMIZER:
                self._phase_beside_a_step(phase, now_ns)
                return
            before = self._phase
            if before == _TAIL:
                if phase != _DATA:
                    return
                self._end_tail(now_ns)
            elif phase == _FORWARD and before == _DATA:
                self._data_ns += now_ns - self._since_ns
            elif phase == _BACKWARD:
                if before == _FORWARD:
                    self._forward_ns += now_ns - self._since_ns
                if self._written_ns:
                    self.writes_more()
            self._since_ns = now_ns
            self._phase = phase
            self._phase_seq += 1
            content = _pack_phase(phase, self._phase_seq, now_ns)
            words = self._words
            words[_SEQ] = busy = words[_SEQ] | 1
            self._bytes[_PHASE_AT:_PHASE_END] = content
            words[_SEQ] = busy + 1
        finally:
            self._release()

    def _phase_beside_a_step(self, phase: int, now_ns: int) -> None:
        """Enter a phase outside a step, or the first phase of a step.

        This does nothing for the phases that are ignored during a pause.
        """
        if not _DATA <= phase <= _OPTIMIZER and phase != _TAIL:
            self._leave_work(phase, now_ns, 0.0, b"")
        elif not self._working and (phase in (_DATA, _TAIL) or self._phase <= _RESTORING):
            self._enter_work(phase, now_ns)

    def pause(self, phase: int, label: str = "", limit_s: float = 0.0) -> None:
        """Enter CHECKPOINT, EVAL or PAUSED for at most `limit_s` seconds (0: the usual limit).

        A pause within a pause replaces the outer pause. `resume` or `phase(DATA)` ends the pause.
        """
        now_ns = self._clock()
        with self._lock:
            self._leave_work(phase, now_ns, limit_s, label.encode()[: layout.LABEL_BYTES])

    def resume(self, phase: int = _DATA) -> None:
        """End a pause, and continue the step and its clock. Without a pause, do the same as `phase`."""
        now_ns = self._clock()
        with self._lock:
            if self._working:
                self.phase(phase)
            else:
                self._enter_work(phase, now_ns)

    def writing(self, on: bool) -> None:
        """Mark the parameters as being written (True) or consistent (False). Idempotent."""
        with self._lock:
            if (self._write_seq & 1) != on:
                self._write_seq += 1
                words = self._words
                words[_SEQ] = busy = words[_SEQ] | 1
                words[layout.WRITE_INDEX] = self._write_seq
                words[_SEQ] = busy + 1

    def written(self) -> None:
        """Record that an optimizer has written. From now until the commit, the rank waits for no other rank.

        If another optimizer writes in the same step, `writes_more` withdraws the record.
        """
        with self._lock:
            self._written_ns = now_ns = self._clock()
            self._store(layout.WRITTEN_AT, layout.WRITTEN.pack(now_ns, self._step))

    def writes_more(self) -> None:
        """Record that another optimizer will write in this step. Until then, the rank may wait for others."""
        with self._lock:
            if self._written_ns:
                self._written_ns = 0
                self._store(layout.WRITTEN_AT, layout.WRITTEN.pack(0, self._step))

    def commit(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        samples: int,
        tokens: int,
        flops: float,
        flags: int,
        position: int = -1,
        phase: int = _DATA,
    ) -> None:
        """End a step: publish all its numbers together, and begin the next step in `phase`.

        `samples`, `tokens` and `flops` count only this step; the page has their sums. A NaN means that a
        number is not known. The time of a generation's first step is stored in `first_step_s` and not in the
        ring. It includes compilation and cache warm-up, whereas the times in the ring determine when a rank
        is considered hung.
        """
        now_ns = self._clock()
        try:
            self._acquire()
            took_ns = self._carried_ns
            if self._working:
                took_ns += now_ns - self._started_ns
            done, pushed, all_samples, all_tokens, all_flops = self._sums
            if done:
                # Readers ignore this entry until `pushed` counts it, so it may be stored before the other
                # values.
                self._times[_RING_AT + pushed % _RING] = took_ns / 1e9
                written_ns = self._written_ns
                self._times[_UNCOMMITTED_AT + pushed % _RING] = (
                    (now_ns - written_ns) / 1e9 if written_ns else _NO_WRITES
                )
                pushed += 1
            else:
                self._first_step_s = took_ns / 1e9
            done += 1
            samples += all_samples
            tokens += all_tokens
            flops += all_flops
            self._sums = (done, pushed, samples, tokens, flops)
            self._step, self._phase, self._phase_seq, self._working = step, phase, 0, True
            self._started_ns = self._since_ns = now_ns
            self._carried_ns = self._written_ns = 0  # WRITTEN in the page includes its step, so it may stay
            if phase == _TAIL:
                self._tail_ns = 0
                self._store(layout.TAIL_AT, layout.TAIL.pack(-now_ns))  # until `tail_begins`
            elif self._tail_ns:
                self._keep_tail(0)
            self._write_seq = write_seq = (self._write_seq + 1) & ~1
            block = _pack_step(
                phase, 0, now_ns, now_ns, write_seq, step, done, pushed, loss, grad_norm,
                samples, tokens, flops, flags, position, self._first_step_s,
                self._data_ns, self._forward_ns,
            )  # fmt: skip
            words = self._words
            words[_SEQ] = busy = words[_SEQ] | 1
            self._bytes[_PHASE_AT:_PAUSE_AT] = block
            words[_SEQ] = busy + 1
        finally:
            self._release()

    def tail_begins(self) -> None:
        """Record that Holdfast has finished its work after the commit and that the script's work begins."""
        with self._lock:
            self._store(layout.TAIL_AT, layout.TAIL.pack(0))

    def tail_is_over(self) -> None:
        """Record the end of the script's work after the commit. The time until the next step is Holdfast's.

        Without this record, a rank that is killed in these microseconds would appear to be doing the script's
        work until its memory is freed, which takes half a second for a large process.
        """
        with self._lock:
            if self._phase == _TAIL:
                self._store(layout.TAIL_AT, layout.TAIL.pack(-self._clock()))

    def disown(self) -> None:
        """Exclude the time since the last commit from the rank's own time, because it may contain a wait."""
        with self._lock:
            self._data_ns, self._forward_ns = layout.OWN.unpack_from(self.memory, layout.OWN_AT)

    def skip(self, step: int) -> None:
        """Record that `step` is skipped. It counts as done, but not as a commit, and has no duration."""
        now_ns = self._clock()
        with self._lock:
            self._step, self._phase, self._phase_seq, self._working = step, _DATA, 0, True
            self._started_ns = self._since_ns = now_ns
            self._carried_ns = self._written_ns = 0
            self._keep_tail(0)
            self._write_seq = (self._write_seq + 1) & ~1
            self._store(_PHASE_AT, self._empty_step())

    def fail(self, kind: int, code: int) -> None:
        """Record the first failure of this generation. Later failures are ignored as its consequences."""
        content = layout.FAIL.pack(self._clock(), kind, code)
        with self._lock:
            if not layout.FAIL.unpack_from(self.memory, layout.FAIL_AT)[0]:
                self._store(layout.FAIL_AT, content)

    def note_snapshot(self, step: int, cost_s: float, held_s: float | None = None) -> None:
        """Record that a snapshot took `cost_s`, which does not count as the rank's own time.

        `held_s` is how long the host was blocked in that time; None means the whole time.
        """
        content = layout.SNAPSHOT.pack(step, cost_s)
        with self._lock:
            if not self._copying_ns:
                self._since_ns += int((cost_s if held_s is None else held_s) * 1e9)
            self._store(layout.SNAPSHOT_AT, content)

    def copy_begins(self, limit_s: float) -> None:
        """Record that Holdfast copies the state from now until `copy_ends`, for at most `limit_s`.

        During the copy, the rank's phase, its pause, and the clocks of both are suspended.
        """
        now_ns = self._clock()
        with self._lock:
            self._copying_ns = now_ns
            self._before_copy = (
                bytes(self._bytes[_PHASE_AT:_PHASE_END]),
                bytes(self._bytes[_PAUSE_AT:_PAUSE_END]),
            )
            self._store(layout.COPYING_AT, layout.COPYING.pack(self._phase))
            self._store(_PHASE_AT, _pack_phase(_SNAPSHOT, self._phase_seq, now_ns))
            self._store(layout.PAUSE_AT, layout.PAUSE.pack(limit_s, _COPY_LABEL))

    def copy_ends(self) -> None:
        """Record that the copy has ended. The previous phase and pause continue as if no time had passed."""
        now_ns = self._clock()
        with self._lock:
            if not self._copying_ns:
                return
            took_ns, self._copying_ns = now_ns - self._copying_ns, 0
            self._since_ns += took_ns
            self._started_ns += took_ns
            if self._tail_ns:
                self._keep_tail(self._tail_ns + took_ns)
            was, pause = self._before_copy
            phase, phase_seq, since_ns = layout.PHASE.unpack(was)
            times_ns = (since_ns + took_ns, self._started_ns)
            self._store(_PHASE_AT, layout.RESUME.pack(phase, phase_seq, *times_ns))
            self._store(_PAUSE_AT, pause)

    def _end_tail(self, now_ns: int) -> None:
        """Count the time since the last commit, except for snapshots, as the rank's own time.

        As in DATA, the rank has not waited for other ranks during that time.
        """
        self._data_ns += now_ns - self._since_ns
        self._note_tail(now_ns, self._tail_ns or self._since_ns)

    def _note_tail(self, now_ns: int, began_ns: int) -> None:
        pushed = self._sums[1]
        if pushed:
            self._times[_TAILS_AT + (pushed - 1) % _RING] = (now_ns - began_ns) / 1e9
        if self._tail_ns:
            self._keep_tail(0)

    def _keep_tail(self, began_ns: int) -> None:
        self._tail_ns = began_ns
        self._store(layout.TAIL_AT, layout.TAIL.pack(began_ns))

    def note_state(self, state_bytes: int, copy_s: float) -> None:
        """Record the size of the state and the duration of copies in earlier generations (0 if not known).

        They determine the time limit for a just-in-time copy until this generation has made a copy.
        """
        content = layout.STATE.pack(state_bytes, copy_s)
        with self._lock:
            self._store(layout.STATE_AT, content)

    def note_late(self, step: int, amended: bool) -> None:
        """Record that the state of `step` changed after its commit.

        `amended` is True if this rank's copies contain the change.
        """
        with self._lock:
            old = layout.AMENDED.unpack_from(self.memory, layout.AMENDED_AT)
            void = layout.VOID.unpack_from(self.memory, layout.VOID_AT)
            old, void = (
                _with(old, step, amended)[: len(old)],
                _ruled(_with(void, step, not amended), len(void)),
            )
            self._store(layout.AMENDED_AT, layout.AMENDED.pack(*old) + layout.VOID.pack(*void))

    def copied(self) -> None:
        """Count a piece of a copy. Threads may call this concurrently, because a lost count is harmless."""
        self._words[layout.COPIED_INDEX] = (self._words[layout.COPIED_INDEX] + 1) & (2**64 - 1)

    def _enter_work(self, phase: int, now_ns: int) -> None:
        if phase != _TAIL and self._tail_ns:
            self._note_tail(now_ns, self._tail_ns)
        self._phase, self._working = phase, True
        self._started_ns = self._since_ns = now_ns
        self._phase_seq += 1
        self._store(_PHASE_AT, layout.RESUME.pack(phase, self._phase_seq, now_ns, now_ns))

    def _leave_work(self, phase: int, now_ns: int, limit_s: float, label: bytes) -> None:
        between = bytes(self._bytes[_PHASE_END:_PAUSE_AT])
        head = layout.PHASE.pack(phase, self._phase_seq + 1, now_ns)
        content = head + between + layout.PAUSE.pack(limit_s, label)
        if self._working:
            self._carried_ns += now_ns - self._started_ns
            if self._phase == _TAIL and not self._tail_ns:
                self._keep_tail(self._since_ns)
            if self._phase in (_DATA, _TAIL):
                self._data_ns += now_ns - self._since_ns
        self._phase, self._working = phase, False
        self._phase_seq += 1
        self._store(_PHASE_AT, content)

    def _empty_step(self) -> bytes:
        return _pack_step(
            self._phase, self._phase_seq, self._started_ns, self._started_ns, self._write_seq,
            self._step, *self._sums[:2], math.nan, math.nan, *self._sums[2:], 0, -1,
            self._first_step_s, self._data_ns, self._forward_ns,
        )  # fmt: skip

    def _store(self, at: int, content: bytes) -> None:
        """Copy a packed value to the page.

        The caller must hold the lock, because only one thread at a time may change the sequence counter. The
        counter is read from the page, which makes it even again if an interrupted writer has left it odd.
        """
        words = self._words
        words[_SEQ] = busy = words[_SEQ] | 1
        self._bytes[at : at + len(content)] = content
        words[_SEQ] = busy + 1


def _with(words: tuple[int, ...], step: int, wanted: bool) -> tuple[int, ...]:
    """Return a page's list of steps, padded with 0, with `step` added as the newest or removed."""
    others = [word for word in words if word not in (0, step + 1)]
    return (*([step + 1] if wanted else []), *others, *([0] * (len(words) + 1)))


def _ruled(words: tuple[int, ...], places: int) -> tuple[int, ...]:
    """Return at most `places` of these steps, newest first. If there is one too many, omit one step.

    Of the older steps, the last one at each mark of the ruler (`kept_steps`) is kept. Copies are made at
    steps on high marks, which are a second or more apart. Without this rule, if steps take only a few
    milliseconds, newer steps would displace a copied step before a sidecar has read it.
    """
    if not words[places]:
        return words[:places]
    seen: set[int] = set()
    drop = places
    for at, word in enumerate(words[: places + 1]):
        [place] = kept_steps.places(word - 1, 0)
        if place in seen and at >= places - kept_steps.RULER_PLACES:
            drop = at
        seen.add(place)
    return (*words[:drop], *words[drop + 1 : places + 1])


def make(path: Path) -> None:
    """Create a new page at `path`. If one already exists, its readers keep the old page.

    Every byte is written, because a store to a hole in a full tmpfs would cause a SIGBUS. If this raises
    `OSError`, `path` is unchanged.
    """
    content = bytearray(layout.PAGE_BYTES)
    layout.HEADER.pack_into(content, 0, layout.MAGIC, layout.VERSION, layout.PAGE_BYTES)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(content)
        folder_rights.share(partial)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def map_writable(path: Path) -> mmap.mmap:
    """Map the page at `path` for writing.

    Raises `OSError`, or `ValueError` if it is not a page of this version.
    """
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size != layout.PAGE_BYTES:
            raise ValueError(f"{path}: {size} bytes, not a progress page of {layout.PAGE_BYTES}")
        memory = mmap.mmap(file.fileno(), layout.PAGE_BYTES, access=mmap.ACCESS_WRITE)
    if not layout.is_page(memory):
        memory.close()
        raise ValueError(f"{path}: not a progress page of version {layout.VERSION}")
    return memory


def void_steps(pages: Iterable[Path], generation: int) -> frozenset[int]:
    """Return the steps of `generation` whose state a rank changed after the commit, according to its page.

    Missing and damaged pages are ignored.
    """
    found: set[int] = set()
    for path in pages:
        with suppress(OSError, ValueError), open(path, "rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                page = layout.read_torn_ok(memory)  # the rank may have died during a write
            if page is not None and page.generation == generation:
                found.update(page.late)
    return frozenset(found)
