"""The template: on one machine, imports what the script imports once, and forks each member from there.

To import torch takes seconds of a core, and members of one machine share its cores. Each member is a launcher
and its zygote, forked at once and apart from then on: the template's death, or that of another member,
is nothing to them. It forks twice, so that the keeper, a subreaper, is the launcher's parent.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback

from holdfast import channel, forking, launch, osproc, sources, warm, wire
from holdfast.channel import Say
from holdfast.command import Program

BOOT = warm.boot("holdfast.template")


def main() -> None:
    """Serve orders for members until the keeper is gone."""
    given = json.loads(os.environ.pop(warm.SPEC))
    program = wire.from_json(Program, given["program"])
    osproc.die_with(given["parent"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    kept = sources.load(given["kept"]) if given["kept"] >= 0 else sources.Sources(program)
    warm.preload(program)
    keeper = given["parent"]
    for order, birth, log, _ in forking.forks(socket.socket(fileno=given["control"]), "member", keeper):
        _be_member(kept, keeper, order.argv, birth, log)


def _be_member(
    kept: sources.Sources, keeper: int, argv: tuple[str, ...], birth: socket.socket, log: int
) -> None:
    """Become a launcher that has its zygote already. Only the zygote's ranks return, and by an exception."""
    os.setsid()
    forking.redirect(log)
    options = launch.options_of(list(argv))
    zygote = warm.fork_zygote(kept, keeper, options.directory, options.nproc, birth)
    try:
        channel.send(birth, Say("born", os.getpid()))
        birth.close()
        code = launch.serve(options, zygote, kept)
    except channel.Closed:
        code = 1  # the keeper has not waited for us
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # what the script's libraries want done at the end is the ranks' to do
