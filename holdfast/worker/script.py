"""Run the user's program to its end, and report to the launcher how it ended."""

from __future__ import annotations

import atexit
import errno
import importlib.util
import io
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType

from holdfast import exit_codes
from holdfast.errors import BadInput, NumericFault, Uncommitted
from holdfast.inspection.victims import is_victim, lost_peers
from holdfast.protocol import foreign_text, progress_writer
from holdfast.protocol.launcher_messages import UNFLUSHED, Ending, SecureAnswer
from holdfast.protocol.progress import FailKind
from holdfast.protocol.rank_channel import WorkerMessage
from holdfast.worker import pauses, script_source
from holdfast.worker.launcher_channel import LauncherChannel
from holdfast.worker.program import Program
from holdfast.worker.script_source import HOLDFAST_FOLDER, STDLIB_FOLDER
from holdfast.worker.teardown import CollectorState, keep_libraries_loaded, tear_down

_MAX_WHY = 200
_STATE_IS_GOOD = ("exception", "distributed")  # the kinds of failures that leave the state valid
_LEAST_S = 5.0  # the minimum time limit for finalizers, even if `--grace` is shorter
_FROM_JOIN = frozenset(("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"))
# The limit for the exit handlers of a rank that has lost its peers, because the handlers may wait for the
# peers.
_VICTIM_S = 5.0


def run(program: Program, runtime: LauncherChannel, source: bytes | None = None) -> int:
    """Run `program` as `__main__`, print what an interpreter would print, and return the exit code.

    `source` is the script as it was when the run began. If it is None, the file is read.

    A failure is reported to the launcher as soon as the state has been secured, and the recovery need not
    wait for this process to unwind. After a failure, or if the script has formed a process group, this
    function does not return, because the process exits here.

    If the script forks, an exception or exit of the child also arrives here. The child is not a rank. It ends
    as it would under an interpreter, and nothing is reported.
    """
    # Registered before the script's exit handlers, to run after them.
    last = atexit.register(partial(_flush_last, runtime))
    before, failed, code = CollectorState.of_now(), "", 0
    try:
        _run_main(program, source)
    except SystemExit as error:
        if runtime.is_ours and ending_of(error, 0, "") is not None and is_victim(error):
            _print_reason(error)
            failed, code = _report_failure(error, runtime)
        else:
            code = _report_exit(error, runtime)
    except BaseException as error:
        # Every exception that ends the script must be reported, including KeyboardInterrupt and torch's own.
        if runtime.is_ours:
            failed, code = _report_failure(error, runtime)
        else:
            trimmed, code = _without_own_frames(error.__traceback__), 1
            sys.excepthook(type(error), error.with_traceback(trimmed), trimmed)
    if failed:
        _exit_after_failure(code, _VICTIM_S if failed == "distributed" else None, before)
    if code == 0:
        keep_last_state(runtime)
    return _exit_cleanly(code, last, runtime, before)


def keep_last_state_at_exit(runtime: LauncherChannel) -> None:
    """Arrange to save the state at exit in an interpreter that runs the script directly, not through `run`.

    This saves the state after the last step or, after an exception, the state of the last commit. An exit
    handler cannot see the exit code, so the state is always saved. A rank that fails is restarted even if its
    page reports success.
    """
    atexit.register(_at_exit, runtime)


def _at_exit(runtime: LauncherChannel) -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        keep_last_state(runtime)
    elif runtime.is_ours and runtime.on_failing is not None and classify_failure(error) in _STATE_IS_GOOD:
        runtime.on_failing()


def keep_last_state(runtime: LauncherChannel) -> None:
    """Save the script's final state. If this fails, the failure is reported, but the run still succeeds."""
    if runtime.on_leaving is None or not runtime.is_ours:
        return
    try:
        runtime.on_leaving()
    except Exception as error:
        why = f"{type(error).__name__}: {_text_of(error)}"[:_MAX_WHY]
        runtime.say(WorkerMessage("left", note=why))
        with suppress(Exception):
            print(f"holdfast: could not save the script's final state: {why}", file=sys.stderr)


def _exit_cleanly(
    code: int, last: Callable[[], bool], runtime: LauncherChannel, before: CollectorState
) -> int:
    """Do what an interpreter does at exit, except destroy the process group.

    If a DDP object is alive, torch's own teardown can hang: the thread that destroys the group holds the GIL
    and joins threads that wait for the GIL. If the script has formed a group, the process therefore exits
    here. Otherwise this returns `code`. `last` is the exit handler that flushes the output. Without a group,
    the interpreter calls it.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return code
    atexit.unregister(last)
    threading._shutdown()  # type: ignore[attr-defined]  # joins non-daemon threads and thread pools
    keep_libraries_loaded()
    atexit._run_exitfuncs()
    flushed = last()
    if runtime.is_ours:  # in a fork, the buffers are copies of data that the rank itself will write
        _limit_teardown(code, runtime)
        _tear_down(before, finalize=True)
        flushed = flushed and last()  # flush again, because finalizers may have printed
    os._exit(code if flushed else exit_codes.NOT_WRITTEN)


def _tear_down(before: CollectorState, *, finalize: bool) -> None:
    # A signal handler may raise anything here, but must not prevent the exit.
    with suppress(BaseException):
        tear_down(before, _report_unwritten, finalize=finalize)


def _report_unwritten(line: str) -> None:
    with suppress(Exception):  # stderr may have been closed
        print(f"holdfast: {line}", file=sys.stderr, flush=True)


def _limit_teardown(code: int, runtime: LauncherChannel) -> None:
    """End the process if its files and finalizers take longer than both `--grace` and `_LEAST_S`.

    Otherwise the process, and with it the run, might wait forever, for example for unresponsive storage.
    """
    launch = runtime.start.launch if runtime.start is not None else None
    limit_s = max(launch.grace_s if launch is not None else 0.0, _LEAST_S)

    def end() -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        where = f" ({frame.f_code.co_filename}, line {frame.f_lineno})" if frame is not None else ""
        why = f"closing files and running finalizers took longer than {limit_s:.0f} s{where}"
        runtime.say(WorkerMessage("failing", os.getpid(), ending=_unflushed(why)))
        _report_unwritten(why)
        os._exit(code or exit_codes.NOT_WRITTEN)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread can be started, so there is no limit
        timer.start()


def _flush_last(runtime: LauncherChannel) -> bool:
    """Flush the script's output right before the process exits. If this fails, report it and return False."""
    why = _flush()
    if why:
        runtime.say(WorkerMessage("failing", os.getpid(), ending=_unflushed(why)))
    return not why


def _unflushed(why: str) -> Ending:
    return Ending(_now(), exit_codes.NOT_WRITTEN, None, False, UNFLUSHED, _now(), why)


def _flush() -> str:
    """Flush stdout and stderr, unless the script has closed or removed them. Return the error, or ""."""
    why = ""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except Exception as error:  # the script may have put any object there
            why = why or f"{type(error).__name__}: {_text_of(error)}".partition("\n")[0][:_MAX_WHY]
            with suppress(Exception):
                print(f"holdfast: {stream!r} cannot be flushed:\n{traceback.format_exc()}", file=sys.stderr)
    return why


def run_unsupervised(program: Program, source: bytes | None) -> None:
    """Run `program` as `__main__`. Its exceptions propagate, and nothing is reported."""
    _run_main(program, source)


def _run_main(program: Program, source: bytes | None) -> None:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    sys.argv = [program.target, *program.args]
    if program.kind == "module":
        if source is not None:
            script_source.pin_module(program, source)
        runpy._run_module_as_main(program.target, alter_argv=True)  # type: ignore[attr-defined]
        return
    main.__file__ = str(Path.cwd() / program.target)  # absolute, because a script may change the directory
    if source is None:
        source = Path(program.target).read_bytes()
    script_source.pin(main.__file__, source)
    code = compile(source, main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _report_exit(error: SystemExit, runtime: LauncherChannel) -> int:
    """Print and report a `sys.exit`, and return the exit code, as the interpreter does."""
    _print_reason(error)
    ended = ending_of(error, _now(), "")
    if ended is None:
        return 0
    _send_ending(runtime, ended)
    return ended.code or 1


def _print_reason(error: SystemExit) -> None:
    if error.code is not None and not isinstance(error.code, int):
        with suppress(Exception):  # stderr may have been closed, which the interpreter ignores too
            print(error.code, file=sys.stderr)


def _report_failure(error: BaseException, runtime: LauncherChannel) -> tuple[str, int]:
    """Report how the script failed; return the kind of failure and the exit code."""
    failed_ns = _now()
    error = _with_explanation(error, runtime)
    trimmed = _without_own_frames(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trimmed))
    ended = ending_of(error, failed_ns, text)
    assert ended is not None
    kind, code = ended.fail, ended.code or 1
    copied = None
    if runtime.on_failing is not None and (kind in _STATE_IS_GOOD or ended.doubtful):
        copied = runtime.on_failing()
    _send_ending(runtime, ended, copied)
    if kind == "distributed":  # the rank is a victim, so only the incident contains its whole traceback
        with suppress(Exception):  # stderr may have been closed
            print(f"holdfast: {lost_peers(text)}", file=sys.stderr)
    elif kind != "bad_input" and sys.excepthook is sys.__excepthook__ and script_source.is_outdated():
        with suppress(Exception):  # `sys.excepthook` would show the file's current lines, so do not use it
            print(text, end="", file=sys.stderr)
    elif kind != "bad_input":  # the supervisor prints bad input, once for all ranks
        sys.excepthook(type(error), error.with_traceback(trimmed), trimmed)
    # The interpreter sets these too. Exit handlers read them, and they keep the objects in the frames alive.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    return kind, code


def ending_of(error: BaseException, failed_ns: int, text: str) -> Ending | None:
    """Return how `error` ends the script; None if the script did not fail. `text` is the traceback."""
    code = 1
    if isinstance(error, SystemExit):
        code = (error.code if isinstance(error.code, int) else int(error.code is not None)) & 0xFF
        if not code:
            return None
        # in a victim, the exit was caused by the lost peer, not by the script itself
        if not is_victim(error):
            call = foreign_text.shortened(f"sys.exit({error.code!r})", foreign_text.WHOLE_BYTES)
            return Ending(_now(), code, None, False, "system_exit", failed_ns, call)
    kind = classify_failure(error)
    wrong = kind == "bad_input"
    message = foreign_text.shortened(
        f"{_text_of(error)}{_line_of(error)}" if wrong else text, foreign_text.WHOLE_BYTES
    )
    raised = "" if wrong else _type_and_first_line(error)
    return Ending(
        _now(),
        exit_codes.BAD_INPUT if wrong else code,
        None,
        False,
        kind,
        failed_ns,
        message,
        raised=raised,
        paused=pauses.step_of_left_pause(error),
        doubtful=isinstance(error, Uncommitted),
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the script's exception type may fail to format itself
        return ""


def _type_and_first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message, as Python prints them."""
    printed = "".join(traceback.format_exception_only(type(error), error)).splitlines()
    lines = [line.strip() for line in printed if line.strip()]
    kind = type(error).__name__  # the preceding lines show where the syntax is wrong
    begins = (n for n, line in enumerate(lines) if line.partition(":")[0].endswith(kind))
    first = next(begins, 0)
    alone = lines[first].partition(":")[2] == ""  # the message begins with an empty line, or is empty
    return " ".join(lines[first : first + 1 + alone])[:_MAX_WHY]


def _with_explanation(error: BaseException, runtime: LauncherChannel) -> BaseException:
    """Return `error`, with a hint added if there is one; `BadInput` if the script formed the group itself."""
    text = _text_of(error)
    early = isinstance(error, ValueError) and "environment variable RANK expected" in text
    twice = isinstance(error, ValueError) and "initialize the default process group twice" in text
    if twice or (early and runtime.start is None):
        what = "torch.distributed.init_process_group(): holdfast.join() does this; remove the call"
        return BadInput(what).with_traceback(error.__traceback__)
    hint = _hint_about(error, runtime)
    if hint:
        _add_note(error, f"holdfast: {hint}")
    return error


def _add_note(error: BaseException, line: str) -> None:
    """Make Python print `line` below the exception's message. Python 3.10 has no notes, so print it now."""
    noted = vars(error).setdefault("__notes__", [])
    if isinstance(noted, list):
        noted.append(line)
    if sys.version_info < (3, 11):
        with suppress(Exception):  # stderr may have been closed
            print(line, file=sys.stderr)


def _hint_about(error: BaseException, runtime: LauncherChannel) -> str:
    """Return advice if the exception results from how the script was started; "" for other exceptions."""
    if type(error) is KeyError and runtime.start is None and error.args and error.args[0] in _FROM_JOIN:
        return (
            f"{error.args[0]} is in the environment only after holdfast.join(), so call join() first."
            " torchrun's variables are set from the start only if neither the script nor its local modules"
            " import holdfast"
        )
    if isinstance(error, ModuleNotFoundError) and error.name and _is_missing(error.name.partition(".")[0]):
        name = error.name.partition(".")[0]
        return (
            f"the script runs in {sys.executable}, which has no module {name!r}: install it there, or use"
            " another Python: holdfast run -- /path/to/python SCRIPT"
        )
    return ""


def _is_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, ValueError):  # the module has been imported only in part
        return False


def _line_of(error: BaseException) -> str:
    """Return the script's innermost line in the traceback of `error`, as " (FILE, line N)"; "" if none."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if (
            not name.startswith((HOLDFAST_FOLDER, "<"))
            and "site-packages" not in name
            and not name.startswith(STDLIB_FOLDER)
        ):
            found = f" ({name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return found


def classify_failure(error: BaseException) -> str:
    """Return "numeric", "distributed" (a dead peer caused the failure), "bad_input" or "exception"."""
    if isinstance(error, NumericFault):
        return "numeric"
    if is_victim(error):  # checked before BadInput, because a peer's death may also make `protect` fail
        return "distributed"
    return "bad_input" if isinstance(error, BadInput) else "exception"


def _send_ending(runtime: LauncherChannel, ending: Ending, copied: SecureAnswer | None = None) -> None:
    """Report how the script ends, on the rank's page and to the launcher.

    `copied` is sent along, because libraries hold the GIL for tens of milliseconds at exit. The thread that
    answers the launcher's orders would have to wait for it.
    """
    if not runtime.is_ours:
        return
    if runtime.start is not None:
        try:
            progress_writer.Page.attach(runtime.page_path).fail(
                FailKind[ending.fail.upper()], ending.code or 0
            )
        except (OSError, ValueError):  # there is no page yet; the message below contains the same information
            pass
    runtime.say(WorkerMessage("failing", os.getpid(), ending=ending, secured=copied))


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Remove the outermost frames, which belong to Holdfast and runpy, from the script's traceback."""
    while trace is not None and trace.tb_next is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((HOLDFAST_FOLDER, "<frozen runpy>")) and not name.endswith("runpy.py"):
            break
        trace = trace.tb_next
    return trace


def _exit_after_failure(code: int, limit_s: float | None, before: CollectorState) -> None:
    """Exit as an interpreter does: wait for threads, run the exit handlers, finalize objects.

    If `limit_s` is None, the launcher limits the time: it kills the process immediately for a restart, or
    after `--grace` at the end of the run.
    """
    if limit_s is not None:
        timer = threading.Timer(limit_s, os._exit, (code,))
        timer.daemon = True
        timer.start()
    try:
        _flush()
        threading._shutdown()  # type: ignore[attr-defined]
        keep_libraries_loaded()
        atexit._run_exitfuncs()
        _flush()
        # A rank that has lost its peers is restarted. Its finalizers are not called, because they might wait
        # for the peers or report success.
        _tear_down(before, finalize=limit_s is None)
        _flush()
    finally:
        os._exit(code)


def _now() -> int:
    return time.monotonic_ns()


# A rank's standard output and error are files, and a full disk must not make the script fail.


_AWAY = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ESTALE})


class _TolerantFile(io.FileIO):
    """A file that drops output if storage does not accept it. A lost line is no reason to stop training."""

    def write(self, data: bytes) -> int:  # type: ignore[override] # any buffer
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _AWAY:
                raise
            return len(data)


def install_tolerant_output() -> None:
    """Make stdout and stderr write line by line to descriptors 1 and 2, without failing on full storage."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        known = getattr(sys, name)
        known.flush()
        raw = io.BufferedWriter(_TolerantFile(number, "w", closefd=False))  # type: ignore[type-var] # a typeshed Protocol
        made = io.TextIOWrapper(raw, known.encoding, known.errors, line_buffering=True)
        made.mode = "w"  # type: ignore[misc] # the interpreter's own streams have this mode
        setattr(sys, name, made)
        setattr(sys, f"__{name}__", made)
