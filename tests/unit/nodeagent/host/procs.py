"""A small /proc in a folder."""

from __future__ import annotations

from pathlib import Path

INIT = 1
MOUNTS = b"""\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
"""
MEMINFO = b"""\
MemTotal:           1000 kB
MemFree:              10 kB
MemAvailable:        250 kB
Buffers:              20 kB
Cached:              240 kB
Active:              300 kB
Inactive:            400 kB
Shmem:                30 kB
Slab:                 40 kB
"""


class Procs:
    """Writes processes and their threads. Writing one again changes it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("loadavg", b"0.50 1.50 2.00 3/900 12345\n")
        self.write("meminfo", MEMINFO)
        self.write("sys/fs/file-nr", b"1000\t0\t10000\n")
        self.write("sys/kernel/pid_max", b"32768\n")
        self.write("sys/kernel/threads-max", b"9000\n")
        self.write("self/mountinfo", MOUNTS)
        self.thread(INIT, name="init", wchan="ep_poll")

    def thread(
        self,
        pid: int,
        tid: int = 0,
        *,
        state: str = "S",
        name: str = "python",
        threads: int = 1,
        start: int = 100,
        flags: int = 4194304,
        switches: int = 5,
        wchan: str = "0",
        stack: str | None = None,
    ) -> None:
        tid = tid or pid
        fields = [
            state,
            "1",
            "1",
            "1",
            "0",
            "-1",
            str(flags),
            *["0"] * 10,
            str(threads),
            "0",
            str(start),
            "9",
        ]
        stat = f"{tid} ({name}) {' '.join(fields)}\n".encode()
        base = f"{pid}/task/{tid}"
        if tid == pid:
            self.write(f"{pid}/stat", stat)
        self.write(f"{base}/stat", stat)
        status = f"Name:\t{name}\nvoluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t0\n"
        self.write(f"{base}/status", status.encode())
        self.write(f"{base}/wchan", wchan.encode())
        if stack is not None:
            self.write(f"{base}/stack", stack.encode())

    def write(self, name: str, raw: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
