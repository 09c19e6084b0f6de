"""Back up this rank's private state in every step, before the optimizer's write.

Private state (buffers, random generators, the position in the data) differs from rank to rank, so no other
rank has a copy. It is kept in two places: in the rank's own store, which outlives its process, and on another
member (see `holdfast.training.protection.private_exchange`). A state that can no longer change is stored as
final, and a lost rank can resume only from a final state. If a state changes after it was sent, it is sent
again at the commit, as final.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from holdfast.protocol.launcher_messages import Launch
from holdfast.snapshot import member_directory
from holdfast.snapshot.private_store import FEW_BYTES, PrivateStore
from holdfast.state.private_state import PrivateState, changed_objects, first_changed
from holdfast.state.random_state import Section
from holdfast.training.protection import snapshot_writer
from holdfast.training.protection.committed_state import LOOK_CLOSELY, CommittedState
from holdfast.training.protection.private_exchange import LocalPrivateState, PrivateStateRing
from holdfast.training.rank import Rank

AFTER = 2  # if buffers change after this many consecutive commits, expect such a change in every step
LEARNING_STEPS = 4  # observe this many steps before sending the state early
NAMED = 3  # a warning names this many of the largest buffers
_COPY_IT = ", or let it become a copy of a model's buffer, as in an AveragedModel without use_buffers"


class PrivateBackup:
    """Collects, stores and exchanges one rank's private state of each step, and checks it at the commit."""

    def __init__(
        self,
        rank: Rank,
        private: PrivateState,
        committed: CommittedState,
        directory: Path,
        pinned_steps: Callable[[], Collection[int]],
    ) -> None:
        """Open the stores. `pinned_steps` returns the snapshots' steps, whose private states are kept."""
        self._rank, self._private, self._committed = rank, private, committed
        every = max(rank.launch.snapshot_every, 0)
        own = directory / member_directory.private_name(rank.number)
        self._own = PrivateStore(own, rank.number, every=every, pins=pinned_steps)
        self._peer = _peer_of(rank.number, rank.launch, directory, self._store_resent)
        sources = self._peer.sources if isinstance(self._peer, PrivateStateRing) else ()
        self._kept = {
            source: _KeptStates(
                PrivateStore(
                    directory / member_directory.kept_name(source), source, every=every, pins=pinned_steps
                )
            )
            for source in sources
        }
        self._kept_lock = threading.Lock()
        self._blob = b""
        self._core: list[Section] = []
        self._versions: list[tuple[int, int | None]] = []  # the buffers' versions when `_core` was collected
        self._timing = SendTiming()
        self._sent = -1  # the last step whose private state was sent
        # Whether private state has ever changed between the optimizer's writes and the commit.
        self._late = False
        self._after = 0  # the number of consecutive steps whose buffers changed after the commit
        self._proven = False  # whether the state stored for the last step was still the same at its commit
        self._took_s = 0.0  # the time spent on the private state in this step
        self._least_s = math.inf  # the shortest such time
        self._full: list[PrivateStore] = []  # the stores that could not grow for lack of room

    # -- in the order of a step

    def begin_loop(self, step: int) -> None:
        """At the loop's start, store and exchange the private state as the state of `step`. Collective."""
        if self._sent > step:  # the script left the previous loop in the middle of a step
            self._receive()
        self._core = self._private.core()
        self._blob = self._private.blob(self._core)
        if self._peer is not None:
            self._peer.connect(self._rank.launch.master_addr)
        self._send(step, sure=True)
        self._receive()
        for kept in self._kept.values():
            # The peer always sends its next state as late, but that does not make this state void.
            kept.sure = False

    def begin_step(self) -> None:
        """Start counting the forward passes of a step."""
        self._timing.begin()

    def after_forward(self, step: int) -> None:
        """Send the private state of `step` if it is expected to be final after this forward pass.

        Forward passes in the tail do not count; they may belong to an evaluation with gradients.
        """
        if self._committed.in_tail:
            return
        if self._peer is not None and self._sent < step and self._timing.after_forward():
            self._collect()
            if self._timing.may_send_early:
                self._send(step)

    def before_optimizer(self, step: int) -> None:
        """Store the private state of `step` in two places before the optimizer takes the step. Collective."""
        if self._sent < step:
            before = self._core
            self._collect()
            self._timing.learn(self._core == before)
            self._send(step)
        # An extra forward pass, or a callback that draws random numbers, has changed the state.
        elif not self._is_as_collected():
            sure = self._is_sure()
            self._collect()
            self._timing.stop_early_states()
            if sure:
                self._resend(step)
        self._receive()

    def check(self, step: int) -> None:
        """At the commit of `step`, check whether its private state has changed since it was sent.

        If it has changed, send it again, and warn the user once.
        """
        private, done = self._private, self._committed.steps_done
        if self._is_as_collected():
            if (self._late or not self._proven) and self._after < AFTER:
                self._resend(step)
            self._proven = True
        else:
            known = not self._late and private.learn_copies(self._core)
            now = private.core()
            if not known:
                self._warn_of_late_change(first_changed(self._core, now))
            self._core, self._blob, self._proven = now, private.blob(now), False
            if self._after < AFTER:
                self._resend(step)
        if (name := private.transient(done)) is not None:
            self._rank.warn_once(
                f"{name} is a non-persistent buffer that changes during training: it is not saved, so after"
                " a restart it has its initial content"
            )
        if (name := private.added(done)) is not None:
            self._rank.warn_once(
                f"{name} is a buffer that was registered after protect: it is not saved, so a restart loses"
                " its content. Register it before protect, as None if it has no content yet"
            )

    def after_commit(self) -> None:
        """Record the times of the committed step, and warn if saving private state takes too long."""
        self._timing.begin()
        self._least_s = min(self._least_s, self._took_s)
        self._took_s = 0.0
        if self._committed.steps_done == snapshot_writer.MIN_SAMPLES and len(self._blob) > FEW_BYTES:
            self._warn_of_size()

    def after_tail(self, step: int, paused: bool) -> None:
        """Send the private state of `step` again at the end of its tail, if tails change buffers.

        A script may write buffers after each commit, such as the buffers of an average. After it has done
        so in `AFTER` consecutive steps, private state is final only at the end of the tail. `paused`
        means that the script paused in the tail.
        """
        if self._after < AFTER and (paused or self._committed.steps_done > LOOK_CLOSELY):
            return
        private = self._private
        if self._after < AFTER:
            what = private.changed_after(self._core)
            self._after = self._after + 1 if what is not None else 0
            if self._after < AFTER:
                return
            self._rank.warn_once(
                f"the buffer {what} is changed after commit(): it is private to each rank, so losing a rank"
                " between optimizer.step() and the next step costs the steps since the last snapshot."
                f" Change it before optimizer.step(){_COPY_IT}"
            )
        self._core = private.with_buffers(self._core)
        self._blob = private.blob(self._core)
        self._resend(step)

    # -- for others

    def changed_objects(self) -> set[str]:
        """Return the names of the private objects that have changed since the commit."""
        text = self._private.objects()
        before = [section for section in self._core if section[0] == "objects"]
        return changed_objects(before, [("objects", text)] if text else [])

    def receive_resent(self) -> None:
        """Store the final states that the peers have sent again.

        Any thread may call this. It never waits, and never raises an exception.
        """
        if self._peer is not None:
            self._peer.receive_again()

    # -- collecting

    def _is_as_collected(self) -> bool:
        closely = self._committed.steps_done < LOOK_CLOSELY or self._private.versions() != self._versions
        began = time.perf_counter()
        found = self._private.is_still(self._core, closely)
        self._took_s += time.perf_counter() - began
        return found

    def _collect(self) -> None:
        began = time.perf_counter()
        self._versions = self._private.versions()
        self._core = self._private.core(expected=True)
        self._blob = self._private.blob(self._core)
        self._took_s += time.perf_counter() - began

    def _is_sure(self) -> bool:
        """Return True if the private state may be sent as final before the optimizer writes.

        This is not allowed in the first step of a generation, nor after the state has ever changed between
        the optimizer's writes and the commit.
        """
        return self._proven and not self._late and self._after < AFTER

    # -- storing and exchanging

    def _send(self, step: int, *, sure: bool | None = None) -> None:
        """Store and send the private state of `step`.

        `sure` means that the state is final and will not change.
        """
        self._sent = step
        sure = self._is_sure() if sure is None else sure
        began = time.perf_counter()
        self._store(self._own, step, self._blob, final=sure)
        if self._peer is not None:
            self._peer.send(step, self._blob, not sure)
        self._took_s += time.perf_counter() - began

    def _resend(self, step: int) -> None:
        """Store and send the private state of `step` again, now as final."""
        self._store(self._own, step, self._blob, final=True)
        if self._peer is not None:
            self._peer.send_again(step, self._blob)

    def _receive(self) -> None:
        """Wait for the peers' private states of the same step, and store them."""
        found = () if self._peer is None else self._peer.receive()
        with self._kept_lock:
            for state in found:
                kept = self._kept[state.source]
                # The peer's state of the previous step has changed, although the peer sent it as final.
                if state.late and kept.sure:
                    self._store(kept.store, kept.step, b"", final=False)
                kept.sure, kept.step = not state.late, self._sent
                self._store(kept.store, self._sent, state.blob, final=not state.late)

    def _store_resent(self, source: int, step: int, blob: bytes) -> None:
        """Store a state that a peer has sent again as final. The main or the listener's thread calls it."""
        kept = self._kept[source]
        with self._kept_lock:
            kept.sure = kept.sure and step != kept.step
            self._store(kept.store, step, blob, final=True)

    def _store(self, store: PrivateStore, step: int, blob: bytes, final: bool) -> None:
        """Put a private state into its store. If there is no room, warn once and store an empty state."""
        generation = self._rank.generation
        try:
            # Do not try to grow a full store again, because that would take time in each step.
            if store in self._full and len(blob) > store.capacity_bytes:
                store.put(generation, step, b"", final=False)
                return
            store.put(generation, step, blob, final)
        except (OSError, ValueError) as error:
            if not self._full:
                self._rank.warn_once(
                    f"the private state of {len(blob)} bytes (buffers, random generators, objects) cannot"
                    f" be stored in memory: {error}; training continues, but a fault costs the steps since"
                    " the last snapshot or checkpoint that includes it. Enlarge /dev/shm, or make the"
                    " buffers smaller"
                )
            self._full.append(store)
            # Another rank waits for this entry, so store an empty one. It is never used, because it is not
            # final.
            store.put(generation, step, b"", final=False)

    # -- warnings

    def _warn_of_late_change(self, what: str) -> None:
        """Warn that private state changes before the commit. From now on, send it as final at the commit."""
        self._late = True
        self._timing.stop_early_states()
        self._rank.warn_once(
            f"{what} changes between optimizer.step() and commit(): it is private to each rank and was"
            " already backed up, so losing a rank at that point costs the steps since the last snapshot."
            f" Change it before optimizer.step(){_COPY_IT if what.startswith('the buffer') else ''}"
        )

    def _warn_of_size(self) -> None:
        """Warn if private state alone takes more time per step than Holdfast may use for all its work."""
        step_s = self._rank.median_step_s()
        budget = self._rank.launch.snapshot_budget
        if not step_s or self._rank.number or self._least_s <= budget * step_s:
            return
        largest = ", ".join(f"{name} of {size / 1e6:.1f} MB" for name, size in self._private.largest(NAMED))
        self._rank.warn_once(
            f"backing up {len(self._blob) / 1e6:.1f} MB of private state takes {self._least_s:.3f} s of each"
            f" {step_s:.3f} s step, because buffers are read, stored and sent every time (the largest:"
            f" {largest}). Register constant buffers, such as masks, with"
            " register_buffer(..., persistent=False)"
        )


class SendTiming:
    """Learns, within one generation, after how many forward passes the private state is final.

    Nothing marks the last forward pass of a step, and random states or the data position may change after it.
    So this class watches the first steps of a generation. If the state was final after the same number of
    forward passes in all of them, later steps send it after that pass, until a step differs.
    """

    def __init__(self) -> None:
        self._final_after = 0  # a number of forward passes; 0 if it is not known yet
        self._alike = 0  # the number of steps whose state was final after `_final_after` passes
        self._passes = 0
        self._never = False

    def begin(self) -> None:
        """Start counting the forward passes of a step, possibly of a repeated step."""
        self._passes = 0

    def after_forward(self) -> bool:
        """Count a forward pass. Return True if the state must be collected now, to observe or to send it."""
        self._passes += 1
        return not self._never and (not self.may_send_early or self._passes == self._final_after)

    @property
    def may_send_early(self) -> bool:
        """Return True if the state may be sent before the optimizer's first write."""
        return self._alike >= LEARNING_STEPS and not self._never

    def learn(self, final: bool) -> None:
        """Before the optimizer's first write, record whether the state after the last pass was `final`."""
        if not self._passes:  # the step was skipped, or no hook observes the model's forward passes
            return
        if not final or (self.may_send_early and self._passes != self._final_after):
            self._never = True
        elif self._passes == self._final_after:
            self._alike += 1
        else:
            self._final_after, self._alike = self._passes, 1

    def stop_early_states(self) -> None:
        """Stop sending states early in this generation."""
        self._never = True


@dataclass(slots=True)
class _KeptStates:
    """The states of another rank that this rank keeps.

    `sure` says whether that rank sent its state of `step` as final before its commit.
    """

    store: PrivateStore
    sure: bool = False
    step: int = -1


def _peer_of(
    rank: int, launch: Launch, directory: Path, again: Callable[[int, int, bytes], None]
) -> PrivateStateRing | LocalPrivateState | None:
    """Return the exchange with other ranks; None if it is not needed."""
    if launch.world_size == 1:
        return None
    if launch.nproc < launch.world_size:
        return PrivateStateRing(
            rank, launch.world_size, launch.nproc, launch.patience_s, again, launch.backups
        )
    source = (rank - 1) % launch.world_size
    path = directory / member_directory.private_name(source)
    return LocalPrivateState(path, source, launch.generation, launch.patience_s)
