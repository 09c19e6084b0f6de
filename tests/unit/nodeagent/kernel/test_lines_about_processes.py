"""Lines that the kernel begins with a process's name: a user chooses it, and more of what follows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.kernel.nvidia_lines import gpu_uuid
from nodeagent.model import Level
from nodeagent.policy import kernel_lines
from nodeagent.policy.kernel_lines import about_process
from tests.unit.nodeagent.kernel.world import LINES, TABLE, XID_79

NAME = 15  # characters of a process's name
# The formats of the kernel that begin with the name, for the user's name and the user's text.
FORMATS = [
    "{name}[11744]: segfault at 0 ip 0000558c612a216b sp 00007ffc485086d0 error 6 in {text}"
    "[116b,558c612a2000+1000] likely on CPU 1 (core 1, socket 0)",
    "{name}[9]: segfault at 0 ip 0 sp 0 error 4 in {text}[1000+1000]",
    "{name}[9] trap int3 ip:10000 sp:0 error:0 in {text}[10000+1000]",
    "{name}[9] general protection fault ip:10000 sp:0 error:0 in {text}[10000+1000]",
    "{name}[9] control protection ip:10000 sp:0 ssp:0 error:1(near ret) in {text}[10000+1000]",
    "{name}[9] bad frame in rt_sigreturn frame:0 ip:10000 sp:0 orax:0 in {text}[10000+1000]",
    "{name}[9]: unhandled exception: DABT (lower EL), ESR 0x92000006, level 2 translation fault in {text}"
    "[10000+1000]",
    "{name}[9]: unhandled signal 11 code 0x1 at 0x0 in {text}[10000+1000]",
    "{name}[9]: segfault (11) at 0 nip 0 lr 0 code 1 in {text}[10000+1000]",
    "{name}[9] vsyscall attempted with vsyscall=none ip:10000 cs:33 sp:0 ax:0 si:0 di:0",
    "{name}: page allocation failure: order:4, mode:0x40dc0(GFP_KERNEL|__GFP_ZERO), nodemask=(null),"
    "cpuset={text},mems_allowed=0",
    "{name}: vmalloc error: size 0, page order 9, failed to allocate pages, mode:0xcc0(GFP_KERNEL), "
    "nodemask=(null),cpuset={text},mems_allowed=0",
    "{name} invoked oom-killer: gfp_mask=0x100dca(GFP_HIGHUSER_MOVABLE|__GFP_ZERO), order=0, oom_score_adj=0",
    "{name} (9): drop_caches: 3",
    "{name} (9) used greatest stack depth: 10000 bytes left",
    "{name}: potentially unexpected fatal signal 11.",
    "{name}/9: potentially unexpected fatal signal 11.",
]  # fmt: skip
LOADED = kernel_lines.load_lines(TABLE)
FAULTS = [
    XID_79,
    "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
    "NVRM: GPU at PCI:0000:3b:00: GPU-7f2b4c1e-0f59-0b5b-9b5d-4f6a7a8f1c11",
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 04 LTSSM Fault Up",
    # The shortest forms that patterns have accepted, which leave the most room in a name.
    "XFS (a): A detected shutting down filesystem",
    "kernel BUG at a:1!",
    "EDAC M: 1 UE on a",
    "nfs: server a not responding",
    "nfs: server a OK",
    "INFO: task a:1 blocked for more than 1 seconds",
    "nvidia-peermem ERROR detected invalid context, skipping further processing",
    "nvme nvmea: I/O timeout, aborting",
    "a: NETDEV WATCHDOG transmit queue 1 timed out",
    *(line.example for line in LOADED),
]
HEALTHY = {line.check for line in LOADED if line.level is Level.HEALTHY}


def unused(line: str) -> bool:
    """Return True if a line says nothing about the node: at most that a program crashed."""
    return {each.check for each in LINES.read(line)} <= HEALTHY and gpu_uuid(line) is None


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[:30])
def test_no_name_and_file_that_together_spell_a_fault_are_taken_for_it(fault: str) -> None:
    words = [at + 1 for at, char in enumerate(fault) if char == " "]
    for cut in range(NAME + 1):
        for at in {cut, *words}:
            for form in FORMATS:
                line = form.format(name=fault[:cut], text=fault[at:].replace("/", "_"))
                assert unused(line), line


def test_a_gpu_cannot_be_reported_as_lost_by_a_program_that_crashes() -> None:
    line = FORMATS[0].format(name="NVRM: a", text="fallen off the bus 0000:3b:00.0")
    assert LINES.read(line) == ()


_pieces = st.sampled_from(sorted({word for fault in FAULTS for word in fault.split(" ")}))
_texts = st.lists(_pieces | st.text(max_size=4), max_size=12).map(" ".join)


@given(_texts, _texts, st.sampled_from(FORMATS))
def test_whatever_a_user_calls_a_process_and_its_file_says_nothing_about_the_node(
    name: str, text: str, form: str
) -> None:
    assert unused(form.format(name=name[:NAME], text=text.replace("/", "_")))


def test_no_line_about_the_node_is_taken_for_one_about_a_process() -> None:
    assert [fault for fault in FAULTS if about_process(fault)] == [
        line.example for line in LOADED if line.name == "nccl_segfault"
    ]
