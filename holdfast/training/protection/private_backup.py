"""Back up this rank's private state of every step before the optimizer makes the step.

Private state (buffers, random generators, the position in the data) differs from rank to rank, so no other
replica has it. Two places keep it: the rank's own store, which outlives its process, and another rank's
member (see `holdfast.training.protection.private_exchange`). A state is stored as final when it cannot change
any more; only from a final one may a lost rank be resumed. What turns out to change after it was given away
is given again at the commit, as final.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection
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

AFTER = 2  # steps in a row in which buffers are changed after the commit: then they are in each
LEARNING_STEPS = 4  # steps in which the state was final after the same forward pass, before it is sent then
NAMED = 3  # buffers in a warning of large ones
_COPY_IT = ", or let it become a copy of a model's buffer, as in an AveragedModel without use_buffers"


class PrivateBackup:
    """One rank's private state of each step: collected, stored, exchanged, and checked at the commit."""

    def __init__(
        self,
        rank: Rank,
        private: PrivateState,
        committed: CommittedState,
        directory: Path,
        pinned_steps: Callable[[], Collection[int]],
    ) -> None:
        """`pinned_steps` gives the steps of the snapshots: while one is there, its private state stays."""
        self._rank, self._private, self._committed = rank, private, committed
        every = max(rank.launch.snapshot_every, 0)
        own = directory / member_directory.private_name(rank.number)
        self._own = PrivateStore(own, rank.number, every=every, pins=pinned_steps)
        self._peer, self._kept = _peer_of(
            rank.number, rank.launch, directory, every, pinned_steps, self._store_resent
        )
        self._kept_lock = threading.Lock()
        self._blob = b""
        self._core: list[Section] = []
        self._versions: list[tuple[int, int | None]] = []  # of the buffers, when `_core` was collected
        self._timing = SendTiming()
        self._sent = -1  # the step whose private state is on its way, or was
        self._late = False  # it was seen to change between the optimizer's writes and the commit
        self._after = 0  # steps in a row in which buffers were changed after the commit
        self._proven = False  # what was stored of the last step was still so at its commit
        self._peer_sure = False  # and the peer's was
        self._peer_step = -1
        self._took_s = 0.0  # by the private state in this step
        self._least_s = math.inf  # the same, of the step in which it was least
        self._full: list[PrivateStore] = []  # those that found no room to grow

    # -- in the order of a step

    def begin_loop(self, step: int) -> None:
        """Store and exchange the private state that the loop starts from, at `step`. Collective."""
        if self._sent > step:  # a loop was left in the middle of a step
            self._receive()
        self._core = self._private.core()
        self._blob = self._private.blob(self._core)
        if self._peer is not None:
            self._peer.connect(self._rank.launch.master_addr)
        self._send(step, sure=True)
        self._receive()
        self._peer_sure = False  # of the first step it is not known either

    def begin_step(self) -> None:
        """Start to count the forward passes of a step."""
        self._timing.begin()

    def after_forward(self, step: int) -> None:
        """A forward pass on the way to `step` is over: send its private state if it is final now.

        One in work after a commit, as of an evaluation with gradients, is none on the way to a step.
        """
        if self._committed.in_tail:
            return
        if self._peer is not None and self._sent < step and self._timing.after_forward():
            self._collect()
            if self._timing.may_send_early:
                self._send(step)

    def before_optimizer(self, step: int) -> None:
        """See that the private state of `step` has two homes before the optimizer makes it. Collective."""
        if self._sent < step:
            before = self._core
            self._collect()
            self._timing.learn(self._core == before)
            self._send(step)
        elif not self._is_as_collected():  # a forward pass more than in the steps before, or a callback draws
            sure = self._is_sure()
            self._collect()
            self._timing.give_up()
            if sure:
                self._resend(step)
        self._receive()

    def check(self, step: int) -> None:
        """Find private state of `step`, which is being committed, that has changed since it was given away.

        The change is given away as well, and the user is warned of it once.
        """
        private, done = self._private, self._committed.steps_done
        if self._is_as_collected():
            if (self._late or not self._proven) and self._after < AFTER:
                self._resend(step)
            self._proven = True
        else:
            known = not self._late and private.explains(self._core)
            now = private.core()
            if not known:
                self._warn_of_late_change(first_changed(self._core, now))
            self._core, self._blob, self._proven = now, private.blob(now), False
            if self._after < AFTER:
                self._resend(step)
        if (name := private.transient(done)) is not None:
            self._rank.warn_once(
                f"{name} is a buffer that is not persistent, and changes in training: it is not kept, so a "
                "restart begins with a new one"
            )
        if (name := private.added(done)) is not None:
            self._rank.warn_once(
                f"{name} is a buffer that was registered after protect: it is not kept, so a restart begins "
                "without it. Register it before protect, as None if it has no content yet"
            )

    def after_commit(self) -> None:
        """The step is committed: take its times."""
        self._timing.begin()
        self._least_s = min(self._least_s, self._took_s)
        self._took_s = 0.0
        if self._committed.steps_done == snapshot_writer.MIN_SAMPLES and len(self._blob) > FEW_BYTES:
            self._warn_of_size()

    def after_tail(self, step: int, paused: bool) -> None:
        """The work after the commit of `step` is over. `paused`: the script paused in it.

        A script may write buffers after each commit, as an average's. If it has in some of the first steps,
        the private state is given away with them from then on, after that work: before it, it is not final.
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
                f"the buffer {what} is changed after commit(): it is private to each rank, so a rank that is"
                " lost between optimizer.step() and the next step costs the steps since the last snapshot."
                f" Change it before optimizer.step(){_COPY_IT}"
            )
        self._core = private.with_buffers(self._core)
        self._blob = private.blob(self._core)
        self._resend(step)

    # -- for others

    def changed_objects(self) -> set[str]:
        """Return the private objects that were changed since the commit."""
        text = self._private.objects()
        before = [section for section in self._core if section[0] == "objects"]
        return changed_objects(before, [("objects", text)] if text else [])

    def receive_resent(self) -> None:
        """Store what the peer has sent again, from any thread. Never waits, and raises nothing."""
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
        """True when the private state may be given away before the optimizer writes, as final.

        It may not in the first step of a generation, nor after a step in which it has changed.
        """
        return self._proven and not self._late and self._after < AFTER

    # -- storing and exchanging

    def _send(self, step: int, *, sure: bool | None = None) -> None:
        """Store the private state of `step` and send it; as final if it is sure not to change any more."""
        self._sent = step
        sure = self._is_sure() if sure is None else sure
        began = time.perf_counter()
        self._store(self._own, step, self._blob, final=sure)
        if self._peer is not None:
            self._peer.send(step, self._blob, not sure)
        self._took_s += time.perf_counter() - began

    def _resend(self, step: int) -> None:
        """Store the private state of `step`, and send it, as final."""
        self._store(self._own, step, self._blob, final=True)
        if self._peer is not None:
            self._peer.send_again(step, self._blob)

    def _receive(self) -> None:
        """Wait for the peer's private state of the same step, and store it."""
        found = None if self._peer is None else self._peer.receive()
        if found is not None and self._kept is not None:
            blob, late = found
            with self._kept_lock:
                if late and self._peer_sure:  # what it gave away the step before did change
                    self._store(self._kept, self._peer_step, b"", final=False)
                self._peer_sure, self._peer_step = not late, self._sent
                self._store(self._kept, self._sent, blob, final=not late)

    def _store_resent(self, step: int, blob: bytes) -> None:
        """Store what the peer says is final: on the main thread, or when the state is secured."""
        if self._kept is not None:
            with self._kept_lock:
                self._peer_sure = self._peer_sure and step != self._peer_step
                self._store(self._kept, step, blob, final=True)

    def _store(self, store: PrivateStore, step: int, blob: bytes, final: bool) -> None:
        """Put a private state into its store. One that finds no room is missing there, nothing else."""
        generation = self._rank.generation
        try:
            # A store that was full stays so: to try again in each step would cost each.
            if store in self._full and len(blob) > store.capacity_bytes:
                store.put(generation, step, b"", final=False)
                return
            store.put(generation, step, blob, final)
        except (OSError, ValueError) as error:
            if not self._full:
                self._rank.warn_once(
                    f"the private state of {len(blob)} bytes (buffers, random generators, objects) cannot"
                    f" be stored in memory: {error}; training continues, and a fault costs the steps since"
                    " the last snapshot or checkpoint that has one; more room in /dev/shm or smaller buffers"
                    " change that"
                )
            self._full.append(store)
            # A rank that waits for it sees that it was passed over: it is not final, so none resumes with it.
            store.put(generation, step, b"", final=False)

    # -- warnings

    def _warn_of_late_change(self, what: str) -> None:
        """From now on what is given away before the commit is not final."""
        self._late = True
        self._timing.give_up()
        self._rank.warn_once(
            f"{what} changes between optimizer.step() and commit(): it is private to each rank and was given "
            "away before, so a rank that is lost there costs the steps since the last snapshot. Change it "
            f"before optimizer.step(){_COPY_IT if what.startswith('the buffer') else ''}"
        )

    def _warn_of_size(self) -> None:
        """Warn when private state takes more of each step than all that Holdfast may take."""
        step_s = self._rank.median_step_s()
        budget = self._rank.launch.snapshot_budget
        if not step_s or self._rank.number or self._least_s <= budget * step_s:
            return
        largest = ", ".join(f"{name} of {size / 1e6:.1f} MB" for name, size in self._private.largest(NAMED))
        self._rank.warn_once(
            f"private state of {len(self._blob) / 1e6:.1f} MB takes {self._least_s:.3f} of"
            f" {step_s:.3f} s in each step: buffers are read, stored and sent every time (the largest:"
            f" {largest}). Register what is constant, such as a mask, with"
            " register_buffer(..., persistent=False)"
        )


class SendTiming:
    """Learns, within one generation, after how many forward passes the private state is final.

    Nothing says which forward pass of a step is its last, nor whether randomness or the data position changes
    after it. So the first steps of a generation are watched; if in all of them the state was final after
    the same number of forward passes, the following steps send it then. The first step that differs ends
    that.
    """

    def __init__(self) -> None:
        self._final_after = 0  # forward passes; 0: not known yet
        self._alike = 0  # steps in which it was final after so many
        self._passes = 0
        self._never = False

    def begin(self) -> None:
        """Start a step, or the same one again."""
        self._passes = 0

    def after_forward(self) -> bool:
        """Count a forward pass; True when the state is to be collected, to learn or to be sent now."""
        self._passes += 1
        return not self._never and (not self.may_send_early or self._passes == self._final_after)

    @property
    def may_send_early(self) -> bool:
        """True when the state may be sent before the optimizer's first write."""
        return self._alike >= LEARNING_STEPS and not self._never

    def learn(self, final: bool) -> None:
        """Learn, before the optimizer's first write, whether the state after the last pass was final."""
        if not self._passes:  # a step that is skipped, or a model whose passes are not seen
            return
        if not final or (self.may_send_early and self._passes != self._final_after):
            self._never = True
        elif self._passes == self._final_after:
            self._alike += 1
        else:
            self._final_after, self._alike = self._passes, 1

    def give_up(self) -> None:
        """Never send early again in this generation."""
        self._never = True


def _peer_of(
    rank: int,
    launch: Launch,
    directory: Path,
    every: int,
    pins: Callable[[], Collection[int]],
    again: Callable[[int, bytes], None],
) -> tuple[PrivateStateRing | LocalPrivateState | None, PrivateStore | None]:
    """Return the exchange with other ranks, and the store for what it brings; None for none."""
    if launch.world_size == 1:
        return None, None
    if launch.nproc < launch.world_size:
        ring = PrivateStateRing(rank, launch.world_size, launch.nproc, launch.patience_s, again)
        path = directory / member_directory.kept_name(ring.source)
        return ring, PrivateStore(path, ring.source, every=every, pins=pins)
    source = (rank - 1) % launch.world_size
    path = directory / member_directory.private_name(source)
    return LocalPrivateState(path, source, launch.generation, launch.patience_s), None
