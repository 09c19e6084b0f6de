from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.kernel import nvidia_lines
from nodeagent.kernel.nvidia_lines import LineFact
from nodeagent.policy import kernel_lines
from nodeagent.policy.nvlink import parse_report, set_bits
from tests.unit.nodeagent.kernel.growth import growth

GPU = "gpu/0000:3b:00.0"
TABLE = Path(kernel_lines.__file__).parent / "xid.csv"
CODES = [int(row["xid"]) for row in csv.DictReader(TABLE.read_text().splitlines()) if row["xid"].isdigit()]

PROCESS = "pid=31337, name=pt_main_thread, "
UNKNOWN = "pid='<unknown>', name=<unknown>, "
# The driver's text after the code, where it differs from the plain "pid, name, channel".
DETAILS = {
    13: UNKNOWN + "Graphics SM Warp Exception on (GPC 1, TPC 3, SM 0): Out Of Range Address",
    31: PROCESS
    + "Ch 00000010, intr 10000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7fc1_23456000. "
    "Fault is of type FAULT_PTE ACCESS_TYPE_VIRT_READ",
    43: PROCESS + "Ch 00000008",
    45: PROCESS + "Ch 00000008",
    48: UNKNOWN + "An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at "
    "partition 6, subpartition 0.",
    62: "1a00(23ec) 00000000 00000000",
    63: "pid=1234, Row Remapper: New row (0x0000000000abcdef) marked for remapping, reset gpu to activate.",
    64: "pid=1234, Row Remapper: All reserved rows for bank are remapped",
    74: UNKNOWN + "NVLink: fatal error detected on link 14(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
    79: "pid=1234, name=python3, GPU has fallen off the bus.",
    92: "pid=1234, name=python3, High single-bit ECC error rate",
    94: "pid=7194, name=python3, Contained: CE User Channel (0x9). RST: No, D-RST: No",
    95: "pid=7062, Uncontained: FBHUB. RST: Yes, D-RST: No",
    109: PROCESS + "Ch 00000003, errorString CTX SWITCH TIMEOUT, Info 0x2c003",
    119: "pid=430, name=nv_queue, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
    120: "pid=1234, name=python3, GSP task exception: Load access page fault",
    137: PROCESS + "Ch 00000011, errorString NVLINK FLA fault",
    143: "GPU failed to initialise",
    144: "SAW_MVB         Fatal    XC0 i0 Link 00 (0x00000001 0x00000002 0x00000000 0x00000000)",
    145: "RLW_REMAP       Nonfatal XC0 i0 Link 02 (0x00000004 0x00000001 0x00000000 0x00000000)",
    146: "TLW_RX_PIPE1    Nonfatal XC0 i0 Link 03 (0x00000010 0x00000020 0x00000030 0x00000040)",
    147: "TREX            Nonfatal XC0 i0 Link 01 (0x00000001 0x00000001 0x00000000 0x00000000)",
    148: "NVLPW_CTRL      Nonfatal XC0 i0 Link 00 (0x00000001 0x00000001 0x00000000 0x00000000)",
    149: "NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x00000000 0x00000000 0x00000000)",
    150: "MSE_WATCHDOG    Fatal   XC0 i0 Link -1 (0x00000001 0x00000001 0x00000000 0x00000000)",
    154: "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
}  # fmt: skip
VARIANTS = {
    13: "GPC 1 TPC 3",
    74: "0x0,0x0,0x10000,0x0,0x0,0x0,0x0",
    144: "SAW_MVB Fatal 0x00000001 0x00000002",
    145: "RLW_REMAP Nonfatal 0x00000004 0x00000001",
    146: "TLW_RX_PIPE1 Nonfatal 0x00000010 0x00000020",
    147: "TREX Nonfatal 0x00000001 0x00000001",
    148: "NVLPW_CTRL Nonfatal 0x00000001 0x00000001",
    149: "NETIR_LINK_EVT Fatal 0x021425c6 0x00000000",
    150: "MSE_WATCHDOG Fatal 0x00000001 0x00000001",
    154: "reset_gpu",
}


def one(text: str) -> LineFact:
    [seen] = nvidia_lines.parse_nvidia(text)
    assert seen.text == " ".join(text.split())
    return seen


def xid(code: int, detail: str, where: str = "PCI:0000:3b:00") -> LineFact:
    return one(f"NVRM: Xid ({where}): {code}, {detail}")


def test_every_xid_of_the_table_is_read_from_the_drivers_line() -> None:
    for code in CODES:
        found = xid(code, DETAILS.get(code, PROCESS + "Ch 00000008"))
        assert (found.check, found.entity, found.value) == ("xid", GPU, code)
        assert found.variant == VARIANTS.get(code, "")


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "NVRM: Xid (0000:3b:00): 79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:3b:00): 79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:00000000:3B:00.0): 79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 79, pid=9, name=a, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 79, pid=9, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:3b:00): 79, ",
        "NVRM: Xid (PCI:0000:3b:00): 79",
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
        "NVRM: GPU at PCI:0000:3b:00 has fallen off the bus.",
        "NVRM: The NVIDIA GPU 0000:3b:00.0\nNVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands.",
        "NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:1e07) installed in this\n"
        "NVRM: system has fallen off the bus and is not responding to commands.",
    ],
)
def test_a_gpu_off_the_bus_is_xid_79_in_every_wording_of_the_driver(line: str) -> None:
    found = one(line)
    assert (found.check, found.entity, found.value, found.variant) == ("xid", GPU, 79, "")


def test_process_channel_and_mig_instances_are_facts() -> None:
    found = xid(43, "pid=4242, name=pt_main_thread, Ch 00000008", "PCI:0000:3b:00 GPU-I:05 GPU-CI:02")
    assert dict(found.facts) == {
        "gpu_instance": "05", "compute_instance": "02",
        "pid": "4242", "name": "pt_main_thread", "channel": "00000008",
    }  # fmt: skip


def test_a_process_unknown_to_the_driver_is_not_a_fact() -> None:
    assert dict(xid(43, "pid='<unknown>', name=<unknown>, Ch 00000008").facts) == {"channel": "00000008"}


def test_xid_13_without_a_location_has_no_variant() -> None:
    assert xid(13, "Graphics Exception: ESR 0x504648=0x114000e 0x504650=0x20").variant == ""
    assert (
        xid(13, "Graphics SM Warp Exception on (GPC 0, TPC 1): Out Of Range Address").variant == "GPC 0 TPC 1"
    )


def test_xid_74_has_registers_only_if_all_seven_are_present() -> None:
    found = xid(74, DETAILS[74])
    assert set_bits(found.variant) == set_bits("0x0,0x0,0x10000,0x0,0x0,0x0,0x0") == ((3, 16),)
    assert dict(found.facts) == {"link": "14"}
    assert xid(74, "NVLink: fatal error detected on link 2(0x0, 0x1)").variant == ""


@pytest.mark.parametrize(
    ("to", "variant"),
    [
        ("0x0 (None)", "none"),
        ("0x1 (GPU Reset Required)", "reset_gpu"),
        ("0x1 (PF FLR)", "reset_gpu"),
        ("0x2 (Node Reboot Required)", "reboot_node"),
        ("0x2 (OS Reboot)", "reboot_node"),
        ("0x2 (Node Reb", "reboot_node"),
        ("0x3 (Drain P2P)", "drain_p2p"),
        ("0x4 (Drain and Reset)", "drain_and_reset"),
        ("0x5 (Recover IMEX)", ""),
        ("0x6 (Bus Reset)", "reset_gpu"),
        ("0x7 (System Reboot)", "reboot_node"),
        ("0x1f", ""),
    ],
)
def test_the_drivers_verdict_is_identified_by_number_whatever_its_words(to: str, variant: str) -> None:
    assert xid(154, f"GPU recovery action changed from 0x0 (None) to {to}").variant == variant


def test_the_policy_decodes_the_content_of_the_line() -> None:
    found = xid(149, DETAILS[149])
    report = parse_report(found.variant)
    assert report is not None
    assert (report.unit, report.fatal, report.info, report.status) == ("NETIR_LINK_EVT", True, 0x021425C6, 0)
    assert dict(found.facts) == {
        "unit": "NETIR_LINK_EVT", "severity": "Fatal", "link": "1", "intrinfo": "0x021425c6",
        "errorstatus": "0x00000000", "contained": "0", "injected": "0",
    }  # fmt: skip


def test_an_nvlink_5_error_may_name_a_process_and_be_truncated() -> None:
    found = xid(145, "pid=1, name=a, RLW_SRC_TRACK Nonfatal XC1 i1 Link 03 (0x00000007 0x0000")
    assert found.variant == "RLW_SRC_TRACK Nonfatal 0x00000007 0x00000000"
    assert xid(145, "RLW_REMAP Nonfatal XC0 i0 Link 02").variant == "RLW_REMAP Nonfatal"
    assert (
        xid(150, "MSE Degraded Fatal XC0 i0 Link -1 (0x1 0x2)").variant
        == "MSE_Degraded Fatal 0x00000001 0x00000002"
    )
    assert xid(144, "something else").variant == ""


@pytest.mark.parametrize(
    ("line", "variant", "facts"),
    [
        (
            "12028, Non-fatal, Link 32 egress non-posted PRIV error (First)",
            "non-fatal",
            {"switch": "3", "link": "32"},
        ),
        ("20034, Fatal, Link 04 LTSSM Fault Up", "fatal", {"switch": "3", "link": "4"}),
        ("11001, Fatal, ingress invalid command", "fatal", {"switch": "3"}),
        ("10003, Host_req_not_forwarded", "", {"switch": "3"}),
        ("12028, Severity 0 Engine instance 32 Sub-engine instance 00", "", {"switch": "3"}),
    ],
)
def test_an_sxid_concerns_the_switch_and_shows_whether_it_is_fatal(
    line: str, variant: str, facts: dict[str, str]
) -> None:
    found = one(f"nvidia-nvswitch3: SXid (PCI:0000:05:00.0): {line}")
    assert (found.check, found.entity, found.value) == ("sxid", "nvswitch/0000:05:00.0", float(line[:5]))
    assert (found.variant, dict(found.facts)) == (variant, facts)


def test_the_line_that_names_a_gpus_uuid_is_not_an_event() -> None:
    line = "NVRM: GPU at PCI:0000:3b:00: GPU-7f2b4c1e-0f59-0b5b-9b5d-4f6a7a8f1c11"
    assert nvidia_lines.parse_nvidia(line) == ()
    assert nvidia_lines.gpu_uuid(line) == (GPU, "GPU-7f2b4c1e-0f59-0b5b-9b5d-4f6a7a8f1c11")
    assert nvidia_lines.gpu_uuid("NVRM: GPU at PCI:0000:3b:00: nothing") is None


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:3b:00): abc, pid=2280636",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  575.57.08",
        "NVRM: fallen off the bus and is not responding to commands.",
        # A client of the driver may claim any version.
        "NVRM: API mismatch: the client version fallen off the bus 0000:3b:00.0, but\nNVRM: this kernel",
        "NVRM: GPU 0000:3b:00.0: the client has the version GPU has fallen off the bus.",
        # A user may give a library any name.
        "a.out[12]: segfault at 0 ip 0 sp 0 error 4 in NVRM: Xid (PCI:0000:3b:00): 79, .so[7f00+1000]",
        "a.out[12]: segfault at 0 ip 0 sp 0 error 4 in \nNVRM: Xid (PCI:0000:3b:00): 79, .so[7f00+1000]",
        "usb 1-1: Product: nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 04",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): garbled, Fatal",
    ],
)
def test_a_line_that_is_not_the_drivers_own_is_ignored(line: str) -> None:
    assert nvidia_lines.parse_nvidia(line) == ()


HOSTILE = [
    "NVRM: Xid (PCI:0000:3b:00): 13, " + "(GPC 1, " * 8192,
    "NVRM: Xid (PCI:0000:3b:00): 74, " + "NVLink: " * 8192,
    "NVRM: Xid (PCI:0000:3b:00): 74, " + "(0x0, 0x0, 0x0, 0x0, 0x0, " * 2500,
    "NVRM: Xid (PCI:0000:3b:00): 154, " + "action changed from  to " * 2700,
    "NVRM: Xid (PCI:0000:3b:00): 149, " + "A " * 32768,
    "NVRM: Xid (PCI:0000:3b:00): 149, A" + " " * 65536,
    "NVRM: Xid (" + "0" * 65536,
    "NVRM: fallen off the bus " + "00:00:" * 11000,
    "NVRM: fallen off the bus " + "PCI:" * 16000,
    "nvidia-nvswitch1: SXid (PCI:" + ":" * 65536,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[-24:])
def test_hostile_lines_are_parsed_in_linear_time(text: str) -> None:
    assert (
        growth(lambda length: nvidia_lines.parse_nvidia(text[:length]), 8192, 65536) < 24
    )  # quadratic would be 64


HEADS = [
    "",
    "NVRM: ",
    "NVRM: Xid (PCI:",
    "NVRM: Xid (PCI:0000:3b:00): ",
    "NVRM: Xid (PCI:0000:3b:00): 149, ",
    "nvidia-nvswitch0: SXid (PCI:",
]


@given(st.sampled_from(HEADS), st.text(max_size=100))
def test_no_text_raises_an_exception(head: str, text: str) -> None:
    for seen in nvidia_lines.parse_nvidia(head + text):
        assert "\n" not in seen.entity + seen.variant
