"""Everything that makes a rank's state outlive its process: snapshots, private state, just in time."""

from __future__ import annotations

import math
import mmap
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput
from holdfast.fileio import safetensors
from holdfast.protocol import progress, progress_writer
from holdfast.protocol.launcher_messages import NO_ROOM, Launch, RankStart, SecureAnswer
from holdfast.snapshot import member_directory, page_tables
from holdfast.snapshot.private_store import FEW_BYTES, PrivateStore
from holdfast.snapshot.slot_file import lock_shared, unlock
from holdfast.state import restore as restoring
from holdfast.state.change_detection import Footprint, Footprints
from holdfast.state.device import Broken, Mark
from holdfast.state.private_state import changed_objects, first_changed
from holdfast.state.random_state import Section
from holdfast.training.protection import snapshot_writer
from holdfast.training.protection.device_copy import HostPart, TensorSplit
from holdfast.training.protection.private_exchange import LocalPrivateState, PrivateStateRing, SendTiming
from holdfast.training.protection.snapshot_writer import (
    FIRST_AFTER_STEPS,
    PendingSnapshot,
    SnapshotReplacement,
    SnapshotWriter,
    WrittenDuringCopy,
    copy_limit_s,
)
from holdfast.training.protection.write_gate import WholeState
from holdfast.worker.pauses import PauseHistory

if TYPE_CHECKING:
    from holdfast.training.state import State

GATE_S = 0.8  # how long a just-in-time copy waits for the optimizer to finish its writes
SNAPSHOT_SHARE = 0.3  # of the budget; the rest is for all else that we do in and beside the ranks
RECENT = 32  # step times whose median the interval is chosen by
LONG_S = (
    0.05  # of work after a commit: then it may be an evaluation, which changes what costs more to look at
)
IN_ROW = 8  # steps with such a change in a row: from then on it is taken for a loader's, which draws ahead
LOOK_CLOSELY = 4  # steps of a generation in which buffers on a device are compared, too
AFTER = 2  # steps in a row in which buffers are changed after the commit: then they are in each
NAMED = 3  # buffers in a warning of large ones
OTHER_KIND = 0.1  # of the state: a copy that reads so much more or less than the last is of another cost
_NUMBER = re.compile(r"\d+")
_COPY_IT = ", or let it become a copy of a model's buffer, as in an AveragedModel without use_buffers"
_INSIDE = "inside the optimizer's writes"
_PATIENCE_S = 10.0  # for a slot to restore from that is being written
LAST_PAUSE_S = 0.01  # between two looks at who holds the slot that the last copy goes to


class Protection:
    """One rank's side of it, from restore to the last commit."""

    def __init__(
        self,
        state: State,
        replicated: Mapping[str, Any],
        launch: Launch,
        rank: RankStart,
        directory: Path,
    ) -> None:
        self._state = state
        self._objects = replicated
        self._launch = launch
        self._generation = launch.generation
        self._rank = rank
        base = (launch.restore.generation, launch.restore.step) if launch.restore else None
        other = launch.restore.other if launch.restore else ()
        page = state.session.page
        moved = page.copied if page is not None else None
        self._device = state.device
        pages = [directory.parent / member_directory.page_name(local) for local in range(launch.nproc)]
        void = partial(progress_writer.void_steps, pages, launch.generation)
        self._snapshots = SnapshotWriter(
            directory,
            replicated,
            launch.world_size,
            base,
            moved,
            self._device,
            void,
            (other[0], other[1]) if len(other) == 2 else None,
            state.flags.document,
        )
        every = max(launch.snapshot_every, 0)
        pins = self._snapshots.arena.steps  # what can be resumed from must have its private states
        own = directory / member_directory.private_name(rank.rank)
        self._own = PrivateStore(own, rank.rank, every=every, pins=pins)
        self._peer, self._kept = _peer_of(rank.rank, launch, directory, every, pins, self._store_resent)
        self._kept_lock = threading.Lock()
        self._copying = threading.Lock()
        self._due: tuple[int, Mark] | None = None  # a snapshot of that step, once the device has come there
        self._transfer: PendingSnapshot | None = None  # the copy that goes on
        self._clean: bool | None = None  # whether it has copied one step's state; None: it is to be looked at
        self._divided: TensorSplit | None = None  # whose tensors were seen to be the footprint's
        self._footprints = Footprints(replicated, self._device.holds)
        self._footprint: Footprint | None = None  # of the last commit
        self._walk = True  # look for other parameters at the next footprint
        self._pauses = PauseHistory()
        self._before_pause: str | None = None  # what had been written when it began
        self._blob = b""
        self._core: list[Section] = []
        self._versions: list[tuple[int, int | None]] = []  # of the buffers, when `_core` was collected
        self._timing = SendTiming()
        self._began = 0  # the step that the loop started from
        self._over = -1  # the step at which the last loop was done
        self._sent = -1  # the step whose private state is on its way, or was
        self._late = False
        self._after = 0  # steps in a row in which buffers were changed after the commit
        self._proven = False  # what was stored of the last step was still so at its commit
        self._peer_sure = False  # and the peer's was
        self._peer_step = -1
        self._loops = False  # the script has begun one
        self._done = 0
        self._looked = 0  # the same, when what the script does after a commit was looked at
        self._paused = False  # since the last commit
        self._outside = False  # told of a change there
        self._committed_s = 0.0  # when the last commit was
        self._defers = False  # copy the state when the work after the commit is over
        self._deferred: int | None = None  # the step whose copy waits for that
        self._retake = SnapshotReplacement(launch.world_size <= 2 * launch.nproc)
        self._extra = -1  # the step of a copy that other members may not have
        self._in_row = 0  # such steps, one after the other
        self._voided = -1  # the last step of which no copy is kept
        self._stale: list[int] = []  # steps whose snapshots are to be forgotten and were being read
        self._ahead: set[str] = set()  # private objects that change there in every step
        self._alike: set[str] | None = None  # those that have in each of the first steps so far
        self._cost_s = 0.0  # of a copy of the kind that the last one was, comparing what is frozen
        self._share = 1.0  # of the state that is not frozen
        self._whole = True  # the copies whose cost is known left nothing out
        self._read = 1.0  # of the state, by these copies
        self._private_s = 0.0  # what private state took in this step
        self._least_private_s = math.inf
        self._copy_s = 0.0  # what a copy of the state may take: for limits
        self._restored = launch.restore is None
        self._every = launch.snapshot_every if launch.snapshot_every > 0 else 0
        self._told: set[str] = set()
        self._full: list[PrivateStore] = []  # those that found no room to grow

    # -- the way in

    def restore(self) -> tuple[int, Mapping[str, bytes] | None]:
        """Put the state of the group's resume point into the objects.

        Returns the step, and the random states to be set when the loop starts. Raises `BadInput`
        when the state is of another model; the first tensor that differs is named.
        """
        found = self._launch.restore
        if found is None:
            return 0, None
        path = Path(found.path)
        if found.source == "checkpoint":
            path = path / "replicated.safetensors"
        try:
            self._restore_from(path)
            blob = Path(self._rank.private).read_bytes()
            private = self._state.private.restore(blob)
            self._expect(path.stat().st_size)
            self._restored = True
            return found.step, private
        except ValueError as error:  # of another model, or not a file of ours at all
            where = Path(found.path).name if found.source == "checkpoint" else f"step {found.step}"
            accepted = "resume with the model that it was made with, or in another run directory"
            raise BadInput(f"{found.source} {where}: {error}; {accepted}") from None

    def _restore_from(self, path: Path) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while (lock := lock_shared(path)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path}: still being written after {_PATIENCE_S:g} s")
            time.sleep(0.001)
        try:
            with path.open(
                "rb"
            ) as file:  # not the locked one: a mapping that is still held would keep its lock
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            layout = safetensors.parse(data)
            private, flags = self._state.private, self._state.flags
            for warning in restoring.restore(self._objects, layout, data, private.moved, private.own, flags):
                self._tell(warning)
            if base := self._launch.restore:
                self._snapshots.restored(path, base.generation, base.step, layout.header)
        finally:
            unlock(lock)

    def before_loop(self, step: int, *, asked: bool = True) -> None:
        """Secure the state that the loop starts from. Collective.

        `asked`: the script has read how many steps are done: what it did since `protect` may depend on it.
        """
        if self._sent > step:  # a loop was left in the middle of a step
            self._receive_private()
        self._core = self._state.private.core()
        self._blob = self._state.private.blob(self._core)
        if self._peer is not None:
            self._peer.connect(self._launch.master_addr)
        self._send_private(step, sure=True)
        self._receive_private()
        self._peer_sure = False  # of the first step it is not known either
        first, self._loops = not self._loops, True
        self._began, self._over = step, -1
        what = self._changed()
        if what is not None:  # by the script, since the last loop: that is what it goes on from
            self._warn_of_change(what, first, asked)
            whole = self._forgets(step) and not self._state.gate.frozen
            if not first:
                self._state.session.note_late(step, whole)
            self._walk = True
            self.record_commit(step)
            self._snapshot(step)
            return
        restored = self._launch.restore
        if restored is None or restored.source != "slot":
            self._snapshot(step)

    def _warn_of_change(self, what: str, first: bool, asked: bool) -> None:
        if not first:
            self._tell(
                f"{what}, between two loops: a restart from a later step does it again if the script comes "
                "by there again, and one from just this step may do it twice, or not at all. Do it before "
                "commit() in the last step of a loop, or as the next one begins: "
                f"`if step == {self._began}:`"
            )
        elif self._launch.restore is not None:
            self._tell(
                f"{what.partition(' after ')[0]} after protect() had restored it: load initial weights "
                "before protect(), or each restart begins with them"
            )
        elif not asked and self._is_loaded_over():
            self._tell(
                f"{what.partition(' after ')[0]} between protect() and the first step: a restart puts the"
                " state of the training there, and this would overwrite it. Load initial weights before"
                " protect(), or under `if state.step == 0:`"
            )

    def _is_loaded_over(self) -> bool:
        """True when a parameter has other values since `protect`, and the group did not give it those.

        DDP gives all ranks the values of rank 0, also to one that is made after `protect`.
        """
        since = self._footprint
        if since is None or self._state.session.rank != 0 or self._footprints.written(since) is None:
            return False
        return self._footprints.returned(since) is None

    def _expect(self, state_bytes: int) -> None:
        """Say how large the state is: how long a copy may take follows from it before one has been made."""
        known_s = self._snapshots.arena.cost_s(state_bytes)
        self._copy_s = max(known_s, state_bytes / progress.COPY_BYTES_S)
        self._state.session.note_state(state_bytes, known_s)

    # -- every step

    def before_step(self) -> None:
        """A step is about to begin: where a drill stops this rank."""
        self._timing.begin()
        self._state.session.drill_point()

    def after_tail(self) -> None:
        """The work after a commit is over: find out whether it has changed protected state, and act on it.

        What all ranks share (a scheduler, an average) is from now on part of the state of that step: a copy
        without it is made again. With any other change no copy has the state of that step: none is kept, and
        the supervisor passes it over. Once it is said to the user.
        """
        since, new = self._footprint, self._done > self._looked
        paused, self._paused, self._looked = self._paused, False, self._done
        if since is None or not new:
            return
        self._stale = [step for step in self._stale if not self._forgets(step)]
        long = paused or time.monotonic() - self._committed_s > LONG_S
        shared, own = self._shared_change(since, paused), self._own_change(paused, long)
        if self._after >= AFTER or (self._done <= LOOK_CLOSELY and not paused):
            self._look_at_buffers(since.step)
        self._defers = shared is not None
        if own is not None:
            self._void(since.step)
        elif shared is not None:
            self._amend(self._footprints.take(since.step, paused))
        else:
            self._copy_deferred(since.step)
        if shared is not None and self._done == LOOK_CLOSELY:
            self._warn_of_private_part()
        if not self._outside and (own or shared) is not None:
            self._outside = True
            self._tell(
                f"{own or shared} after the commit of step {since.step} and before the next step: a fault or"
                " a stop there may cost the steps since the last snapshot. Do it in the next step: a"
                " scheduler's between optimizer.step() and commit(), others before optimizer.step()"
            )

    def _look_at_buffers(self, step: int) -> None:
        """Give the private state away with buffers that the script writes after each commit, as an average's.

        It does if it has in some of the first steps: from then on what was given before is not final.
        """
        private = self._state.private
        if self._after < AFTER:
            what = private.changed_after(self._core)
            self._after = self._after + 1 if what is not None else 0
            if self._after < AFTER:
                return
            self._tell(
                f"the buffer {what} is changed after commit(): it is private to each rank, so a rank that is"
                " lost between optimizer.step() and the next step costs the steps since the last snapshot."
                f" Change it before optimizer.step(){_COPY_IT}"
            )
        self._core = private.with_buffers(self._core)
        self._blob = private.blob(self._core)
        self._resend_private(step)

    def _warn_of_private_part(self) -> None:
        """Say which private object follows each commit beside what is shared: it is taken for data."""
        follows = self._state.private.no_data(self._alike or set())
        if follows:
            self._tell(
                f"{' and '.join(follows)}, private to a rank, is changed after each commit, too: a fault"
                " there takes the change since the last commit back (what draws data draws it again). If it"
                " follows the steps, as a scheduler does, change it before commit(), or set its attribute"
                " holdfast_private = False if it is the same on all ranks"
            )

    def _shared_change(self, since: Footprint, paused: bool) -> str | None:
        """Say what all ranks share and was changed since the commit."""
        return (self._footprints.moved if paused else self._footprints.written)(since) or (
            self._footprints.late(since)
        )

    def _own_change(self, paused: bool, long: bool) -> str | None:
        """Say which private object was changed since the commit, where that is looked at.

        A loader may draw ahead there: only those count that do not change without long work, too.
        """
        early = self._done <= LOOK_CLOSELY
        if not (long or early):
            return None
        changed = self._changed_apart()
        late = (
            self._changed_early(changed, paused) if early else changed - self._ahead - (self._alike or set())
        )
        if not late:
            return None
        self._in_row = self._in_row + 1 if self._voided == self._state.step - 1 else 1
        if self._in_row > IN_ROW:  # without any snapshot a fault would cost all steps since then
            self._ahead |= late
            self._tell(
                f"{' and '.join(sorted(late))}, private to a rank, was changed after {IN_ROW} commits in a"
                " row: it is taken for data that is drawn ahead, and a fault takes its change since the last"
                " commit back. Change it before optimizer.step()"
            )
            return None
        return f"{min(late)} was changed"

    def _changed_apart(self) -> set[str]:
        """Return the private objects that were changed since the commit."""
        text = self._state.private.objects()
        before = [section for section in self._core if section[0] == "objects"]
        return changed_objects(before, [("objects", text)] if text else [])

    def _changed_early(self, changed: set[str], paused: bool) -> set[str]:
        """Return which of the objects that changed after one of the first commits did so in that step alone.

        One that changes there in each of them draws ahead, as a loader does, or follows the steps.
        """
        so_far = self._alike
        if not paused:
            self._alike = changed if so_far is None else so_far & changed
        if so_far is None:
            return changed if paused else set()
        return changed - so_far

    def _amend(self, now: Footprint) -> None:
        """Let the state of the last commit be the present one, in all copies."""
        step, wanted = now.step, self._wanted(now.step)
        with self._copying:
            self._end_transfer()
            whole = not self._state.gate.frozen and self._forgets(step)
            if whole:
                self._footprint = now
        self._state.session.note_late(step, whole)
        if wanted and whole:
            self._copy_due(step)

    def _void(self, step: int) -> None:
        """Keep no copy of the state of `step`: it lacks what the script has changed since."""
        wanted, self._voided = self._wanted(step), step
        self._state.session.note_late(step, amended=False)
        with self._copying:
            self._end_transfer()
            if not self._state.gate.frozen and not self._forgets(step):
                self._stale.append(step)
        self._due = self._deferred = None
        if wanted and self._launch.snapshot_every:
            self._retake.voided(step, self._every)

    def _wanted(self, step: int) -> bool:
        """True when a snapshot of this step is there, on its way, or due; whoever takes none wants none."""
        if self._rank.local_rank:
            return False
        pending = self._transfer.step if self._transfer is not None else self._due[0] if self._due else -1
        return step in (pending, self._deferred) or self._snapshots.held(self._generation, step)

    def _forgets(self, step: int) -> bool:
        """Forget the snapshot of `step`; False when it exists all the same."""
        if self._rank.local_rank:  # its member's first rank does that
            return True
        forgotten = self._snapshots.forget(self._generation, step)
        self._retake.forgot(self._snapshots.arena.steps(self._generation))
        return forgotten

    def _copy_deferred(self, step: int) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred == step:
            self._copy_due(step)

    def _copy_due(self, step: int) -> None:
        self._deferred = None
        if self._device.queues:
            self._due = step, self._device.mark()
        else:
            self._copy(step)

    def after_forward(self, step: int) -> None:
        """A forward pass on the way to `step` is over: give its private state away if it is final now.

        One in work after a commit, as of an evaluation with gradients, is none on the way to a step.
        """
        if self._done > self._looked:
            return
        if self._peer is not None and self._sent < step and self._timing.after_forward():
            self._collect()
            if self._timing.may_send_early:
                self._send_private(step)

    def before_optimizer(self, step: int, *, skipped: bool = False) -> None:
        """See that the private state of `step` has two homes before the optimizer makes it. Collective.

        `skipped`: no optimizer does, as where a gradient scaler found an overflow. What was changed by then,
        as the scale, has its right place in the step.
        """
        close = self._done <= LOOK_CLOSELY and not (self._outside or skipped)
        if close and (what := self._changed()) is not None:
            self._outside = True
            self._tell(
                f"{what}, before optimizer.step(): a fault that comes then costs the steps since the last "
                "snapshot. Change protected state between optimizer.step() and commit()"
            )
        if self._sent < step:
            before = self._core
            self._collect()
            self._timing.learn(self._core == before)
            self._send_private(step)
        elif not self._as_sent():  # a forward pass more than in the steps before, or what a callback draws
            sure = self._is_sure()
            self._collect()
            self._timing.give_up()
            if sure:
                self._resend_private(step)
        self._receive_private()

    def _as_sent(self) -> bool:
        """True when the private state is as it was collected."""
        private = self._state.private
        closely = self._done < LOOK_CLOSELY or private.versions() != self._versions
        began = time.perf_counter()
        found = private.is_still(self._core, closely)
        self._private_s += time.perf_counter() - began
        return found

    def _is_sure(self) -> bool:
        """True when the private state may be given away before the optimizer writes, as final."""
        return self._proven and not self._late and self._after < AFTER

    def _collect(self) -> None:
        began = time.perf_counter()
        self._versions = self._state.private.versions()
        self._core = self._state.private.core(expected=True)
        self._blob = self._state.private.blob(self._core)
        self._private_s += time.perf_counter() - began

    def _send_private(self, step: int, *, sure: bool | None = None) -> None:
        """Store the private state of `step` and send it, as final if it is sure not to change any more.

        It is not sure in the first step of a generation, and after a step in which it has changed.
        """
        self._sent = step
        sure = self._is_sure() if sure is None else sure
        began = time.perf_counter()
        self._store(self._own, step, self._blob, final=sure)
        if self._peer is not None:
            self._peer.send(step, self._blob, not sure)
        self._private_s += time.perf_counter() - began

    def _receive_private(self) -> None:
        """Keep what another rank has given away for the same step, once it is here."""
        found = None if self._peer is None else self._peer.receive()
        if found is not None and self._kept is not None:
            blob, late = found
            with self._kept_lock:
                if late and self._peer_sure:  # what it gave away the step before did change
                    self._store(self._kept, self._peer_step, b"", final=False)
                self._peer_sure, self._peer_step = not late, self._sent
                self._store(self._kept, self._sent, blob, final=not late)

    def _store_resent(self, step: int, blob: bytes) -> None:
        """Keep what another rank says is final: on the main thread, or when the state is secured."""
        if self._kept is not None:
            with self._kept_lock:
                self._peer_sure = self._peer_sure and step != self._peer_step
                self._store(self._kept, step, blob, final=True)

    def _store(self, store: PrivateStore, step: int, blob: bytes, final: bool) -> None:
        """Put a private state into its store. One that finds no room is missing there, nothing else."""
        try:
            if (
                store in self._full and len(blob) > store.capacity_bytes
            ):  # to try in each step would cost each
                store.put(self._launch.generation, step, b"", final=False)
                return
            store.put(self._launch.generation, step, blob, final)
        except (OSError, ValueError) as error:
            if not self._full:
                self._tell(
                    f"the private state of {len(blob)} bytes (buffers, random generators, objects) cannot"
                    f" be stored in memory: {error}; training continues, and a fault costs the steps since"
                    " the last snapshot or checkpoint that has one; more room in /dev/shm or smaller buffers"
                    " change that"
                )
            self._full.append(store)
            # Whoever waits for it sees that it was passed over: it is not final, so nobody resumes with it.
            store.put(self._launch.generation, step, b"", final=False)

    def check_private_state(self, step: int) -> None:
        """Notice private state that changed after it was given away, and say so once."""
        private = self._state.private
        if self._as_sent():
            if (self._late or not self._proven) and self._after < AFTER:
                self._resend_private(step)
            self._proven = True
        else:
            known = not self._late and private.explains(self._core)
            now = private.core()
            if not known:
                self._changed_late(first_changed(self._core, now))
            self._core, self._blob, self._proven = now, private.blob(now), False
            if self._after < AFTER:
                self._resend_private(step)
        if (name := private.transient(self._done)) is not None:
            self._tell(
                f"{name} is a buffer that is not persistent, and changes in training: it is not kept, so a "
                "restart begins with a new one"
            )

        if (name := private.added(self._done)) is not None:
            self._tell(
                f"{name} is a buffer that was registered after protect: it is not kept, so a restart begins "
                "without it. Register it before protect, as None if it has no content yet"
            )

    def _resend_private(self, step: int) -> None:
        """Store the private state of `step`, and send it, as final."""
        self._store(self._own, step, self._blob, final=True)
        if self._peer is not None:
            self._peer.send_again(step, self._blob)

    def _changed_late(self, what: str) -> None:
        """From now on what is given away before the commit is not final."""
        self._late = True
        self._timing.give_up()
        self._tell(
            f"{what} changes between optimizer.step() and commit(): it is private to each rank and was given "
            "away before, so a rank that is lost there costs the steps since the last snapshot. Change it "
            f"before optimizer.step(){_COPY_IT if what.startswith('the buffer') else ''}"
        )

    def after_commit(self, step: int) -> None:
        """Take a snapshot when one is due: at the interval, and once soon after the start.

        Without the second a fault that leaves nobody to copy just in time would cost all steps since then,
        and the first copy just in time would have to fill memory that was never touched.
        """
        self._done += 1
        self._timing.begin()
        self._least_private_s = min(self._least_private_s, self._private_s)
        self._private_s = 0.0
        if self._done == snapshot_writer.MIN_SAMPLES and len(self._blob) > FEW_BYTES:
            self._warn_of_private_bytes()
        if self._done == 1:
            state_bytes = self._snapshots.state_bytes()  # an optimizer has no state before its first step
            self._expect(state_bytes)
            self._meet_slots(state_bytes)
        if self._launch.snapshot_every < 0 and self._done == snapshot_writer.MIN_SAMPLES:
            self._choose_interval()
        if self._launch.snapshot_every and self._rank.local_rank == 0:
            self._copy_if_due(step)
        self._committed_s = time.monotonic()  # what a copy takes is no work of the script's

    def _copy_if_due(self, step: int) -> None:
        retake, due = self._retake, bool(self._every) and step % self._every == 0
        pending = self._transfer is not None or self._due is not None  # its slot may be empty as yet
        if not pending:
            retake.look(step, self._snapshots.arena.steps(self._generation), self._every)
        if due:
            retake.regular()
        if due or step == self._began + FIRST_AFTER_STEPS or retake.meets(step):
            if self._defers:  # the script changed the state after the last commit, and perhaps does so again
                self._deferred = step
            else:
                self._copy_due(step)
        elif retake.is_due(step) and not pending and not self._stale:  # else the void one is the newest
            self._deferred = step
            if retake.is_extra:
                self._extra = step

    def _meet_slots(self, state_bytes: int) -> None:
        """Let the copies of this process find the pages of the slots: the first may be one just in time."""
        if self._rank.local_rank or self._device.queues:  # a device's slots are pinned, and so met
            return
        if self._copying.acquire(blocking=False):
            try:
                page_tables.meet(self._snapshots.arena, state_bytes)
            except OSError:  # then the copy says what is wrong, if it is still so
                return
            finally:
                self._copying.release()

    def _warn_of_private_bytes(self) -> None:
        """Say it when private state takes more of each step than all that Holdfast may take."""
        step_s = self._median_step_s()
        if not step_s or self._rank.rank or self._least_private_s <= self._launch.snapshot_budget * step_s:
            return
        largest = ", ".join(
            f"{name} of {size / 1e6:.1f} MB" for name, size in self._state.private.largest(NAMED)
        )
        self._tell(
            f"private state of {len(self._blob) / 1e6:.1f} MB takes {self._least_private_s:.3f} of"
            f" {step_s:.3f} s in each step: buffers are read, stored and sent every time (the largest:"
            f" {largest}). Register what is constant, such as a mask, with"
            " register_buffer(..., persistent=False)"
        )

    def keep_host_part(self) -> HostPart | None:
        """Return what the host has of the state: it may be a step ahead when the device's is copied.

        Nothing of a state that the script has written since its commit.
        """
        since, part = self._footprint, self._snapshots.keep()
        if part is None or since is None:
            return part
        known = part.division is self._divided  # the same tensors as in the last step
        look = self._footprints.quickly_moved if known else self._footprints.moved
        if look(since) is not None:
            return None
        self._divided = part.division
        return part

    def advance_copy(self, *, must: bool = False) -> None:
        """On a device: begin and end the copy that is due. The host waits for none.

        `must`: the optimizer's writes are about to be queued. A copy that has not begun begins now, once the
        device has done the step before, and the writes begin when the copy has ended. It is never queued
        before: it would wait, with its slot, for what a dead peer may keep from ending.
        """
        if self._state.gate.frozen:
            return
        going_on = self._transfer
        if going_on is not None and self._device.reached(going_on.offload.copy.marks[-1]):
            with self._copying:
                self._end_transfer()
        if self._due is not None:
            step, mark = self._due
            if must:
                self._device.wait(mark)
            if self._device.reached(mark):
                self._due = None
                self._guarded(lambda: self._begin_transfer(step))
        if must and self._transfer is not None:
            self._clean = self._changed() is None  # from now on the optimizer writes
            self.delay_writes()

    def delay_writes(self) -> None:
        """Let what is queued from now on, in the present stream, begin when the copy under way has ended."""
        going_on = self._transfer
        if going_on is not None:
            self._device.hold_back(going_on.offload.copy)

    def _begin_transfer(self, step: int) -> None:
        with self._copying:
            self._end_transfer()
            if not self._state.gate.frozen and self._changed() is None:
                self._clean = None
                self._transfer = self._snapshots.begin(self._launch.generation, step)

    def _end_transfer(self) -> None:
        """Make a snapshot of the copy that goes on, once it has ended. `_copying` is held."""
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        clean = self._changed() is None if self._clean is None else self._clean
        try:
            self._note(transfer.step, self._snapshots.finish(transfer, lambda: clean), held_s=0.0)
        except WrittenDuringCopy:  # the script has written the state meanwhile, without an optimizer
            return

    def record_commit(self, step: int) -> None:
        """Remember what the state of `step` looks like: a copy that is made later must find it so."""
        self._footprint = self._footprints.take(step, self._walk)
        self._walk = False
        for name in self._footprints.unseen:
            self._tell(
                f"the state_dict() of {name} gives copies of its tensors, so a change after commit() is not"
                f" noticed, and is lost by a fault: change {name} before commit()"
            )

    def _changed(self, since: Footprint | None = None) -> str | None:
        """Say what has been written into the state since it was committed, None when nothing was."""
        since = since or self._footprint
        what = None if since is None else self._footprints.moved(since)
        return None if what is None or since is None else f"{what} after the commit of step {since.step}"

    # -- pauses

    def before_pause(self, label: str) -> None:
        """A pause begins: copy the state if it may be written, so that a peer's death in it costs nothing."""
        step = self._state.step
        self._pauses.began(label, time.monotonic())
        if self._device.queues:
            self.advance_copy(must=True)
        wanted = self._launch.snapshot_every != 0 and self._pauses.wants_copy(label, self._copy_s)
        held = not wanted or self._snapshots.held(self._launch.generation, step)
        self._before_pause = self._changed()
        if not held and self._before_pause is None and not self._state.gate.frozen:
            self._copy(step)

    def forward_in_pause(self) -> None:
        """A module is used in a pause: if the weights were exchanged for others, they are now."""
        if not self._pauses.known and self._changed() is not None:
            self._pauses.writes()

    def after_pause(self, label: str) -> None:
        """Learn from it; what was exchanged and put back is the state again."""
        what, since = self._changed(), self._footprint
        self._paused = True
        if what is not None and since is not None and self._before_pause is None:
            self._pauses.writes()
            back = self._footprints.returned(since)
            if back is not None:
                self._footprint = back
            else:
                self._outside = True  # told here
                self._tell(
                    f"{what}, in the pause {label!r}, and is not as it was: a fault there may cost the steps"
                    " since the last snapshot. Put back what was swapped in, or change it before commit()"
                )
        self._pauses.ended(time.monotonic())

    # -- the end of a loop

    def after_loop(self, step: int) -> None:
        """The loop is over: keep its state, for who is lost from now on may find that the others have exited.

        Not after a loop of less than an interval: there may be many, one for each epoch.
        """
        self._over = step
        if self._device.queues:
            self.advance_copy(must=True)
            with self._copying:
                self._end_transfer()
        long_enough = self._every and step - self._began >= self._every
        if (
            long_enough
            and step != self._voided
            and not self._snapshots.held(self._launch.generation, step)
            and self._changed() is None
        ):
            self._copy(step)

    def keep_final_state(self) -> str:
        """The script has ended: see that a copy has the state that it ended with; return why none has, or "".

        None has if the script left its loop by `break`, for then it would do more when it is started again;
        or if it has changed the state since: weights that it loaded are nothing to train on from.
        """
        step, since = self._over, self._footprint
        if not self._loops:
            return "the script began no loop over state.steps(n)"
        if step < 0 or since is None or since.step != step:
            return "the script left its loop before all steps were done"
        own = self._changed_apart() - self._ahead - (self._alike or set())
        what = self._footprints.moved(since) or self._footprints.late(since)
        if what is None and (named := self._state.private.no_data(own)):
            what = f"{' and '.join(named)} was changed"
        if what is not None or step == self._voided:
            return f"{what or 'protected state was changed'} after the last commit"
        if self._rank.local_rank:  # its member's first rank copies
            return ""
        if self._launch.snapshot_every == 0:
            return "--snapshot-every 0"
        return self._copied_at_last(step)

    def _copied_at_last(self, step: int) -> str:
        """See that there is a snapshot of `step`, the last; return why there is none, or "".

        Another rank of the member may be writing the very same, before a pause or at the end of its loop, and
        a checkpoint may be read from the slot that comes next: either is waited for, as long as a copy may
        take. A reader that is not done then keeps its slot, and the newer snapshot is overwritten.
        """
        generation, snapshots = self._generation, self._snapshots
        give_up_at = time.monotonic() + copy_limit_s(snapshots.expected_bytes())
        while not snapshots.held(generation, step):
            if self._state.gate.frozen:
                return "the generation was ended meanwhile"
            late = time.monotonic() > give_up_at
            failed = self._copy(step, over_newer=late)
            if failed or (late and not snapshots.held(generation, step)):
                return failed or "the slots of the snapshots were in use"
            time.sleep(LAST_PAUSE_S)
        return ""

    def _choose_interval(self) -> None:
        step_s = self._median_step_s()
        if step_s is None:
            return
        budget = self._launch.snapshot_budget * SNAPSHOT_SHARE
        # A rank alone has no survivor that could copy just in time: then the budget alone decides.
        seldom_s = snapshot_writer.MIN_INTERVAL_S if self._launch.world_size > 1 else 0.0
        self._every = snapshot_writer.snapshot_interval(self._cost_s, step_s, budget, seldom_s)

    def _median_step_s(self) -> float | None:
        page = self._state.session.page
        times_s = progress.step_times_s(page.memory, RECENT) if page is not None else None
        return sorted(times_s)[len(times_s) // 2] if times_s else None

    def _snapshot(self, step: int) -> None:
        if self._rank.local_rank == 0:
            self._copy(step)

    def _copy(self, step: int, *, over_newer: bool = False) -> str:
        """Copy the present state, when the device has made it. Returns what failed, "" for nothing.

        A slot that is in use is no failure: then there is no copy. `over_newer`: see
        `SnapshotWriter.write_over`.
        """
        self._device.wait(self._device.mark())
        return self._guarded(lambda: self._copy_now(step, over_newer))

    def _copy_now(self, step: int, over_newer: bool) -> None:
        with self._copying:
            self._end_transfer()
            write = self._snapshots.write_over if over_newer else self._snapshots.write
            cost_s = write(self._launch.generation, step)
        if cost_s is not None:
            self._note(step, cost_s)

    def _guarded(self, copy: Callable[[], None]) -> str:
        """Copy on behalf of Holdfast: the time that it takes is not the rank's. Returns as `_copy` does."""
        self._state.session.copy_begins(self._snapshots.expected_bytes())
        try:
            copy()
        except OSError as error:
            self._tell(f"no snapshot: {error}; training continues, and existing checkpoints are kept")
            return f"no snapshot: {error}"
        finally:
            self._state.session.copy_ends()
        return ""

    def _note(self, step: int, cost_s: float, held_s: float | None = None) -> None:
        """Record what a copy took, and how long the host was held up by it, if not for all of that."""
        self._walk = True
        self._retake.made(step, self._snapshots.arena.steps(self._generation))
        if step == self._extra:
            self._snapshots.extra = self._generation, step
        share, whole = self._snapshots.frozen.share, self._snapshots.was_whole
        read, coming = self._snapshots.was_read, self._snapshots.frozen.coming
        if share > self._share or whole != self._whole or abs(read - self._read) > OTHER_KIND:
            self._cost_s = 0.0  # comparing takes another time than copying, and than leaving out
        self._share, self._whole, self._read = share, whole, read
        # The first copies read all that is frozen, those that follow only what is written of it.
        expected_s = cost_s * min(coming / read, 1.0) if read else cost_s
        self._cost_s = min(expected_s, self._cost_s or expected_s)
        self._copy_s = max(self._copy_s, cost_s)
        self._state.session.note_snapshot(step, cost_s, cost_s if held_s is None else held_s)
        if self._every and self._launch.snapshot_every < 0:
            self._choose_interval()  # again: the machine may have been busy when it was first chosen

    # -- the way out

    def snapshot_just_in_time(self, generation: int) -> SecureAnswer:
        """Copy the state just in time, on the listener's thread, and freeze the rank before its next write.

        Bounded by `GATE_S` and the copy. The gate stays closed: this generation has ended. One that is still
        restoring makes no step any more either: it would overwrite what the others resume from. When there
        was no room for the copy, it may be asked again.
        """
        rank = self._rank.rank
        if generation != self._launch.generation:
            return SecureAnswer(rank, -1, False, f"this is generation {self._launch.generation}")
        if not self._restored:
            self._state.gate.freeze(GATE_S)
            return SecureAnswer(rank, -1, False, "its state is still being restored")
        limit_s = GATE_S + (progress.COPIES - 1) * self._copy_s  # and the copy is yet to come
        give_up_at = time.monotonic() + limit_s
        try:
            if not self._state.gate.freeze(limit_s):
                return SecureAnswer(rank, self._state.step, False, _INSIDE)
            return self._write_whole(give_up_at)
        finally:
            if self._peer is not None:
                self._peer.receive_again()

    def snapshot_before_write(self) -> None:
        """The optimizer is about to write what is no number: keep the state that is whole."""
        self._write_whole(0.0)

    def snapshot_before_exit(self) -> None:
        """The main thread is on its way out with an exception: leave the state, if it is whole."""
        self._write_whole(time.monotonic() + GATE_S if self._device.queues else 0.0)

    def _write_whole(self, give_up_at: float) -> SecureAnswer:
        """Copy the state that is whole on the device, waiting for one until then. Raises nothing."""
        rank = self._rank.rank
        gate = self._state.gate
        try:
            while (whole := gate.whole(give_up_at - time.monotonic())) is not None:
                if why := self._state.spoilt(whole.step):
                    return SecureAnswer(rank, whole.step, False, why)
                try:
                    return self._write(whole)
                except WrittenDuringCopy:
                    if time.monotonic() > give_up_at:
                        break
        except (OSError, BadInput, Broken) as error:
            return SecureAnswer(rank, self._state.step, False, str(error))
        return SecureAnswer(rank, self._state.step, False, _INSIDE)

    def _write(self, whole: WholeState) -> SecureAnswer:
        rank, step, generation = self._rank.rank, whole.step, self._launch.generation
        gate = self._state.gate
        with self._copying:
            self._end_transfer()
            if self._snapshots.held(generation, step):
                return SecureAnswer(rank, step, True, "held already")
            since = self._footprint if whole.part is None else None  # a part was looked at when it was kept
            if since is not None and since.step != step:
                return SecureAnswer(rank, step, False, "between two steps")
            if step == self._voided:
                return SecureAnswer(rank, step, False, "changed after its commit")
            if since is not None and self._defers and self._done > self._looked:
                return SecureAnswer(rank, step, False, "in work after a commit that changes the state")
            if since is not None and (what := self._changed(since)) is not None:
                return SecureAnswer(rank, step, False, what)
            cost_s = self._snapshots.write_just_in_time(
                generation,
                step,
                whole.part,
                lambda: gate.still(whole) and (since is None or self._changed(since) is None),
            )
            if cost_s is None and not self._snapshots.held(generation, step):
                return SecureAnswer(rank, step, False, NO_ROOM)
        return SecureAnswer(rank, step, True)

    def silence_change_warnings(self) -> None:
        """The script was warned of what makes the state change after a commit: that is not said as well."""
        self._outside = True

    def _tell(self, text: str) -> None:
        """Say something in the rank's own output, once, whatever the numbers in it."""
        kind = _NUMBER.sub("#", text)
        if kind not in self._told:
            self._told.add(kind)
            print(f"holdfast: rank {self._rank.rank}: {text}", file=sys.stderr, flush=True)


def _peer_of(
    rank: int,
    launch: Launch,
    directory: Path,
    every: int,
    pins: Callable[[], Collection[int]],
    again: Callable[[int, bytes], None],
) -> tuple[PrivateStateRing | LocalPrivateState | None, PrivateStore | None]:
    """Return who gives this rank its private state, and where that is kept; None for nobody, and nowhere."""
    if launch.world_size == 1:
        return None, None
    if launch.nproc < launch.world_size:
        apart = PrivateStateRing(rank, launch.world_size, launch.nproc, launch.patience_s, again)
        path = directory / member_directory.kept_name(apart.source)
        return apart, PrivateStore(path, apart.source, every=every, pins=pins)
    source = (rank - 1) % launch.world_size
    path = directory / member_directory.private_name(source)
    return LocalPrivateState(path, source, launch.generation, launch.patience_s), None
