"""Define `holdfast.join()` and the session that it returns: one rank of the group, with protected state."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput, Fenced
from holdfast.process import gpu_assignment
from holdfast.protocol import codec, environment, rank_channel
from holdfast.protocol.launcher_messages import Launch, RankStart, SecureAnswer
from holdfast.protocol.progress import Phase
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder
from holdfast.training import caught_errors
from holdfast.training.misuse import arguments
from holdfast.training.protection.rank_protection import Protection
from holdfast.training.rank import NOTE_CHARACTERS, Rank, device, local_rank
from holdfast.training.rehearsal import rehearse
from holdfast.training.state import State
from holdfast.training.world_sizes import OnResize
from holdfast.worker import launcher_channel, nested_scripts
from holdfast.worker.ending_exception import ExceptionWatcher, UnwindingException
from holdfast.worker.thread_frames import whereabouts

if TYPE_CHECKING:
    import torch

_COLD = (
    "the script used a GPU before holdfast.join(), so no process can be kept warm and restarts are slow."
    " Build the model on the CPU, and move it to session.device after join()"
)


class Session:
    """One process's membership in one generation of the group."""

    def __init__(
        self, launch: Launch, start: RankStart, channel: launcher_channel.LauncherChannel | None
    ) -> None:
        self._rank = Rank(launch, start, channel)
        self._protection: Protection | None = None
        self._is_over = False  # the generation's state has been secured, even if nothing was protected yet
        self._state: State | None = None

    @property
    def rank(self) -> int:
        """The number of this process in the group, from 0."""
        return self._rank.number

    @property
    def local_rank(self) -> int:
        """The number of this process on its machine, from 0."""
        return self._rank.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self._rank.world_size

    @property
    def resized(self) -> tuple[int, int] | None:
        """The old and the new number of ranks; None if it has not changed, or if the first loop has begun.

        If the number has changed, the protected state was saved by the old number of ranks.
        """
        return self._rank.sizes.resized

    def on_resize(self, function: OnResize) -> OnResize:
        """Let the group continue with fewer members; call `function(old, new)` when the world size changes.

        `--min-members` sets whether the group may continue with fewer members, and with how many. Every rank
        calls `function` with the old and the new number of ranks, after the state has been restored and
        before the first step. The function adapts what depends on that number, such as a sampler or the
        learning rate. Can be used as a decorator.

        Raises:
            BadInput: `function` cannot be called, or a loop over the steps has already begun.
        """
        if not callable(function):
            raise BadInput(f"on_resize({function!r}): expected a function of the old and the new world size")
        if self._state is not None and self._state._has_begun:
            raise BadInput("on_resize() was called after the first loop began: call it after join()")
        self._rank.sizes.hook = function
        return function

    @property
    def generation(self) -> int:
        """How many times the group has been formed, including this time."""
        return self._rank.generation

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        return self._rank.device

    def protect(self, *unnamed: Any, **objects: Any) -> State:
        """Protect `objects` from now on, and restore the group's resume point, if any, into them.

        `objects` can be modules, optimizers, schedulers, and any objects with state_dict and load_state_dict.
        On return, they have the state that training continues from, and the `step` of the result is the
        number of steps in that state.

        Raises:
            BadInput: an object cannot be protected, the resume point is from a different model, or protect
                was called before.
        """
        arguments.require_names("protect(model=model, optimizer=optimizer)", unnamed)
        if self._state is not None:
            raise BadInput("protect() was already called: call it once, after join(), with all objects")
        state = State(self._rank, objects)
        self._connect(state)
        state._begin()
        self._state = state
        if self._rank.drill.take_nan():  # a drill was requested before there was a state to corrupt
            state._poison()
        return state

    def _connect(self, state: State) -> None:
        """Let the protection of `state` handle the launcher's orders and the end of the script."""
        self._protection, channel = state._protection, self._rank.channel
        if self._protection is None or channel is None:
            return
        if self._is_over:
            state._gate.freeze(0.0)
        channel.on_failing = self._protection.last_copies.before_exit
        channel.on_leaving = self._leaving
        if self._rank.page is not None:
            self._rank.page.phase(Phase.RESTORING)

    def _leaving(self) -> None:
        """Save the last state of a script that has ended without error, and report whether this succeeded."""
        if self._protection is None or self._rank.channel is None:
            return
        why = self._protection.keep_final_state()
        if why:
            self._rank.say(WorkerMessage("left", note=why[:NOTE_CHARACTERS]))
        elif self._rank.page is not None:
            self._rank.page.phase(Phase.DONE)

    def _report_unwinding(self, found: UnwindingException, since_ns: int, overdue: bool) -> None:
        """Report an exception while the script's `finally` blocks still run, because peers are waiting."""
        from holdfast.worker import script

        ending = script.ending_of(found.error, since_ns, found.text)
        if self._rank.channel is not None and ending is not None:
            step = self._rank.page.step if self._rank.page is not None else -1
            hint = replace(ending, unwinding=True, overdue=overdue, step=step)
            self._rank.channel.say(WorkerMessage("failing", os.getpid(), ending=hint))

    def _withdraw_unwinding(self) -> None:
        """Withdraw the report, because the script has handled the exception and continues."""
        if self._rank.channel is not None:
            self._rank.channel.say(WorkerMessage("withdrawn", os.getpid()))

    def _exception_watcher(self) -> ExceptionWatcher:
        def place() -> object:
            return self._rank.page.place if self._rank.page is not None else None

        return ExceptionWatcher(self._report_unwinding, self._withdraw_unwinding, place)

    def _forked(self) -> None:
        """Detach a process that the script forked from the launcher, because it must not act as the rank."""
        self._protection = None
        self._rank.forked()
        if self._state is not None:
            self._state._forked()

    # -- joining

    def _enter(self) -> None:
        """Become the rank: set the environment, open the page, start listening, form the process group."""
        import torch

        if self._rank.channel is not None:
            os.environ.update(environment.rank_environment(self._rank.launch, self._rank.start))
            self._rank.open_page()
            if self._rank.channel.on_join is not None:
                self._exception_watcher().start()
                self._rank.channel.on_join(self._obey)
            else:
                threading.Thread(target=self._listen, name="holdfast", daemon=True).start()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            if self._rank.channel is not None:
                # When a peer dies, NCCL's watchdog would end this process, or abort the collective that stops
                # the device from writing more. A survivor must stay alive for its state to be copied.
                os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._form_group()
        self._rank.joined()

    def _form_group(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        limit = timedelta(seconds=self._rank.launch.patience_s)
        if self._rank.channel is None:
            has_address = "MASTER_ADDR" in os.environ and self.world_size > 1
            if has_address:
                dist.init_process_group(backend)
            else:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            return
        listener = self._rank.channel.listen_fd
        store = dist.TCPStore(
            self._rank.launch.master_addr,
            self._rank.launch.master_port,
            self.world_size,
            is_master=self.rank == 0,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener if self.rank == 0 and listener >= 0 else None,
        )
        prefixed = dist.PrefixStore(f"holdfast/{self.generation}", store)
        hook, before = sys.excepthook, caught_errors.open_sockets()
        dist.init_process_group(
            backend, store=prefixed, rank=self.rank, world_size=self.world_size, timeout=limit
        )
        self._rank.peers = caught_errors.PeerConnections.since(before)
        # Torch's hook adds the rank to each line, but the launcher's log already does so.
        sys.excepthook = hook

    # -- listening

    def _listen(self) -> None:
        """Obey the launcher's orders until it closes the connection, and then end this process."""
        assert self._rank.channel is not None
        # Started here, because the main thread would wait until the new thread runs, which delays a restart.
        self._exception_watcher().start()
        while True:
            try:
                order, _ = rank_channel.receive(self._rank.channel.control, WorkerOrder)
            except codec.InvalidMessage:
                continue
            except (rank_channel.Closed, OSError):
                os._exit(1)
            self._obey(order)

    def _obey(self, order: WorkerOrder) -> None:
        assert self._rank.channel is not None
        if order.do == "where":
            self._rank.channel.say(WorkerMessage("where", where=whereabouts()))
        elif order.do == "secure":
            self._secure(self._rank.channel, order.generation, order.copy)
        elif order.do == "drill":
            self._obey_drill(order.drill)

    def _secure(self, channel: launcher_channel.LauncherChannel, generation: int, copy: bool) -> None:
        # Set this first, because the script's thread may be in `protect`, which reads this attribute.
        self._is_over = self._is_over or generation == self.generation
        if self._protection is None:
            answer = SecureAnswer(self.rank, -1, False, "nothing is protected yet")
        else:
            try:
                answer = self._protection.snapshot_just_in_time(generation, copy)
            except Exception as error:
                # Torch, a driver or the file system may raise anything during a copy. Without an answer, the
                # group would wait for this rank. If this thread ended, the rank would receive no more orders.
                why = f"{type(error).__name__}: {error}"[:NOTE_CHARACTERS]
                answer = SecureAnswer(self.rank, -1, False, why)
        channel.say(WorkerMessage("secured", secured=answer))

    def _obey_drill(self, what: str) -> None:
        try:
            self._rank.drill.obey(what, self._state._poison if self._state is not None else None)
        except Exception as error:  # the thread that receives orders must survive a drill that fails
            self._rank.note(f"the drill {what} failed: {type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class _Joined:
    process: int  # the id of the process that joined; the session is not valid in its forked children
    session: Session


_joined: _Joined | None = None


def _forked() -> None:
    if _joined is not None:
        _joined.session._forked()


os.register_at_fork(after_in_child=_forked)


def join() -> Session:
    """Become a rank of the group, and return the session. A second call returns the same session.

    Under holdfast, a warm process waits here until the launcher assigns it a rank. Under torchrun, the rank
    comes from torchrun's environment variables. Without either, the group consists of this one rank. On
    return, torch.distributed is initialised.

    Raises:
        BadInput: this process was forked or started by a rank's script.
        Fenced: the launcher started this process without assigning it a rank.
    """
    global _joined
    if _joined is not None and _joined.process == os.getpid():
        return _joined.session
    mine = launcher_channel.current_channel or _from_environment()
    if mine is not None and not mine.is_ours:
        raise BadInput("join() was called in a process that the script forked, which cannot be a rank")
    if mine is None:
        nested_scripts.refuse_below_rank(os.environ)
        launch, rank = _place_without_launcher()
    else:
        if mine.start is None:
            _park(mine)
        order = mine.wait_start()
        if order.launch is None or order.rank is None:
            raise Fenced("the launcher started this process without assigning it a rank")
        launch, rank = order.launch, order.rank
        if rank.rank == 0 and _has_used_gpu() and not mine.parked:
            sys.stderr.write(f"holdfast: {_COLD}\n")
    session = Session(launch, rank, mine)
    session._enter()
    _joined = _Joined(os.getpid(), session)
    return session


def _park(mine: launcher_channel.LauncherChannel) -> None:
    """Prepare this process to become a rank without delay, and report whether it can be kept warm.

    The preparation does not use a GPU, because this process does not know yet which GPU it will get, and
    until then the memory of that GPU belongs to another process.
    """
    if device().type == "cpu":
        rehearse(device())
    mine.parked = not _has_used_gpu()
    mine.say(WorkerMessage("parked" if mine.parked else "unparkable", os.getpid()))


def _has_used_gpu() -> bool:
    """Return True if the launcher assigns the GPUs and this process has already used CUDA."""
    return environment.DEVICES in os.environ and gpu_assignment.uses_cuda()


_LAUNCHERS = {environment.CONTROL, environment.DIRECTORY, environment.NPROC}


def _place_without_launcher() -> tuple[Launch, RankStart]:
    """Return the group and the rank according to torchrun's variables; without them, a group of one rank."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    nproc = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
    launch = Launch(generation, world_size, nproc, "", 0, 0, 0.0)
    return launch, RankStart(int(os.environ.get("RANK", "0")), local_rank())


def _from_environment() -> launcher_channel.LauncherChannel | None:
    """Return the channel to the launcher if it has started this process cold (`--warm cold`), or None."""
    from holdfast.worker import script

    given = os.environ.pop(environment.START, "")
    if not given:
        return None
    if not os.environ.keys() >= _LAUNCHERS:  # START is a leftover: no launcher has started this process
        return None
    control = _inherited_control(os.environ[environment.CONTROL])
    order = codec.from_json(WorkerOrder, json.loads(given))
    directory, nproc = Path(os.environ[environment.DIRECTORY]), int(os.environ[environment.NPROC])
    mine = launcher_channel.LauncherChannel(control, directory, order.local_rank, nproc, start=order)
    launcher_channel.set_current(mine)
    mine.say(WorkerMessage("born", os.getpid()))
    script.keep_last_state_at_exit(mine)
    return mine


def _inherited_control(number: str) -> socket.socket:
    """Return the connection to the launcher, which this process has inherited as the descriptor `number`.

    Raises BadInput if that descriptor is not a connection to the launcher.
    """
    try:
        control = socket.socket(fileno=int(number))
    except (OSError, ValueError, OverflowError):  # it is closed or not a socket, so it was not inherited
        control = None
    if control is not None and (control.family, control.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        return control
    if control is not None:
        control.detach()  # the descriptor belongs to other code, so it must stay open
    raise BadInput(nested_scripts.refusal())
