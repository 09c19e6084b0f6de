"""Read from /proc which processes belong to a launcher, which part of a run each is, and what each uses."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.launcher import cli
from holdfast.process import title

_LAUNCHER = f"from {cli.__name__} import main"
_TITLES = {
    f"{title.PREFIX}{text}": part
    for text, part in (
        (title.MEMBERS_FORK_SERVER, "template"),
        (title.PARTS_FORK_SERVER, "parts"),
        ("supervisor", "supervisor"),
        ("sidecar ", "sidecar"),
        ("launcher ", "launcher"),
    )
}
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one instant."""

    pid: int
    parent: int
    state: str
    argv: tuple[str, ...]
    name: str  # comm, which a forked process may have changed
    rss_bytes: int
    descriptors: int


def snapshot() -> dict[int, Process]:
    """Return all readable processes, by PID."""
    found: dict[int, Process] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            process = find_process(int(entry.name))
            if process is not None:
                found[process.pid] = process
    return found


def find_process(pid: int) -> Process | None:
    """Return the process `pid`; None if it is gone or cannot be read."""
    folder = Path(f"/proc/{pid}")
    try:
        name, state, parent, rss_bytes = read_stat((folder / "stat").read_text())
        argv = tuple((folder / "cmdline").read_text(errors="replace").rstrip("\0").split("\0"))
        descriptors = sum(1 for _ in (folder / "fd").iterdir()) if state != "Z" else 0
    except OSError:
        return None
    return Process(pid, parent, state, argv, name, rss_bytes, descriptors)


def read_stat(text: str) -> tuple[str, str, int, int]:
    """Return the name, state, parent and resident bytes from the text of /proc/PID/stat (see proc(5))."""
    end = text.rindex(")")
    fields = text[end + 2 :].split()
    return text[text.index("(") + 1 : end], fields[0], int(fields[1]), int(fields[21]) * _PAGE_BYTES


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of the live threads of `pid`; 0 if the process is gone.

    The result is exact, unlike the ticks in /proc/PID/stat: those are sampled, and miss a thread that sleeps
    in step with the timer.
    """
    total_ns = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            total_ns += int((thread / "schedstat").read_text().split()[0])
    except OSError:
        return 0.0
    return total_ns / 1e9


def below(root: int, processes: Mapping[int, Process]) -> list[Process]:
    """Return the descendants of `root`, parents before children."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    todo = [root]
    while todo:
        mine = children.get(todo.pop(), [])
        found += mine
        todo += [each.pid for each in mine]
    return found


def parts(keeper: int, processes: Mapping[int, Process], ranks: Iterable[int]) -> dict[int, str]:
    """Return which part of a `holdfast run` each of its processes is, by PID.

    The parts are: keeper, supervisor, sidecar, template (the fork server of launchers), parts (the fork
    server of the supervisor and the sidecars), launcher, rank, warm (a warm process or the launcher's zygote;
    see `zygotes`) and other.
    """
    training = set(ranks)
    names: dict[int, str] = {keeper: "keeper"} if keeper in processes else {}
    for process in below(keeper, processes):
        parent = names.get(process.parent, "")
        names[process.pid] = "rank" if process.pid in training else _part(process, parent)
    return names


def _part(process: Process, parent: str) -> str:
    words = process.argv
    if parent == "keeper":
        named = next((part for text, part in _TITLES.items() if words[0].startswith(text)), "")
        if named:
            return named
        if "serve" in words and "supervisor" in words:
            return "supervisor"
        if "sidecar" in words:
            return "sidecar"
        if any(_LAUNCHER in word for word in words):
            return "launcher"
    if parent == "launcher":
        return "warm"  # or the zygote; `zygotes` distinguishes them
    return "other"


def zygotes(names: Mapping[int, str], processes: Mapping[int, Process]) -> dict[int, str]:
    """Return `names` with each launcher's zygote named "zygote" instead of "warm".

    Warm processes are forks of the zygote, but unlike it, each leads a session.
    """
    found = dict(names)
    for pid, name in names.items():
        if name == "warm" and pid in processes and not _leads_session(pid):
            found[pid] = "zygote"
    return found


def _leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return True
