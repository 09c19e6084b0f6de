"""The members' fork server: imports the script's modules once per machine, and then forks each member.

Importing torch takes seconds of CPU time, and all members of a machine share its cores. A forked member is a
launcher with its zygote, independent of the fork server and of other members. The server forks twice so that
the keeper, which is a subreaper, becomes the launcher's parent.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback

from holdfast.launcher import cli
from holdfast.launcher.workers.zygote_handle import fork_zygote
from holdfast.process import fork_server, linux, title
from holdfast.protocol import codec, environment, rank_channel
from holdfast.protocol.rank_channel import WorkerMessage
from holdfast.worker import script_source
from holdfast.worker.program import Program
from holdfast.worker.script_source import ProgramSources
from holdfast.worker.zygote import preload


def main() -> None:
    """Fork members on the keeper's orders, until the keeper exits."""
    given = json.loads(os.environ.pop(environment.WARM))
    program = codec.from_json(Program, given["program"])
    linux.end_with_parent(given["parent"])
    title.set_title(title.MEMBERS_FORK_SERVER)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sources = script_source.load(given["kept"]) if given["kept"] >= 0 else ProgramSources(program)
    preload(program)
    keeper = given["parent"]
    for order, birth, log, _ in fork_server.forks(socket.socket(fileno=given["control"]), "member", keeper):
        _be_member(sources, keeper, order.argv, birth, log)


def _be_member(
    sources: ProgramSources, keeper: int, argv: tuple[str, ...], birth: socket.socket, log: int
) -> None:
    """Become a launcher with a zygote. Never returns.

    In a rank that the zygote forks, SystemExit is raised.
    """
    os.setsid()
    fork_server.redirect(log)
    options = cli.parse_options(list(argv))
    linux.set_name("launcher")
    title.set_title(f"launcher {options.name}")
    zygote = fork_zygote(sources, keeper, options.directory, options.nproc, birth)
    try:
        rank_channel.send(birth, WorkerMessage("born", os.getpid()))
        birth.close()
        code = cli.serve(options, zygote, sources)
    except rank_channel.Closed:
        code = 1  # the keeper no longer waits for this member
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # only ranks may run the exit handlers of the script's libraries
