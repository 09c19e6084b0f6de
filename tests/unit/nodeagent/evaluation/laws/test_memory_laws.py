"""A restart of the agent or a reload of the shipped policy, at any moment, changes no verdict.

One evaluator runs without a break. The other is stored and restored, or reads its policy again, between any
two observations. Both must always return the same findings, whatever happens to the node: faults in several
variants, GPUs that change their slot or their MIG mode, gaps between the samples, and late readings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.quotas import MAX_VARIANTS
from nodeagent.evaluation.retention import FORGET_S
from nodeagent.evaluation.samples import LATE_S
from nodeagent.model import Observation
from nodeagent.policy.loading import shipped
from tests.unit.nodeagent.evaluation.world import DAY_S

POLICY = shipped()
SLOTS = ("gpu/0000:3b:00.0", "gpu/0000:4b:00.0")
PORT, DISK, DRIVER = "port/mlx5_0/1", "disk//data", "driver"
A100, MOMENT_S = "NVIDIA A100-SXM4-80GB", 0.001

Step = tuple[float, float, str, str]  # the wait, how late it is reported, what happens, and the chore then
ON_GPU = [
    *(f"xid {code}" for code in (13, 48, 63, 64, 74, 79, 94, 95, 119, 154)),
    *(f"154 {word}" for word in ("none", "reset_gpu", "reboot_node")),
    *("gpu_reset", "replaced", "cleared", "variants"),
    *(f"ecc_dbe {value}" for value in (0, 1, 2, 2)),
    *(f"gpu_temperature_margin {value}" for value in (-1, -1, -1, 7, 20)),
    *(f"recovery_action {value}" for value in (0, 1, 2)),
    *(f"gpu_state {value}" for value in (0, 0, 1, 1)),
    *(f"mig {mode}" for mode in ("on", "off")),
    *("swap", "claim"),
]
ELSEWHERE = [
    "boot", *(f"nvml {value}" for value in (0, 2, 2)), *(f"ib {value}" for value in (0, 1, 9)), "gone",
    *(f"disk_used {value}" for value in (10, 99, 99)),
]  # fmt: skip
WAITS = [0.5, 5.0, 10.0, 10.0, 30.0, 100.0, 400.0, 1000.0, 4000.0, 31 * DAY_S]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(WAITS),
        st.sampled_from([0.0, 0.0, 0.0, 20.0, 290.0]),
        st.one_of(
            st.builds("{} {}".format, st.integers(0, 1), st.sampled_from(ON_GPU)),
            st.sampled_from(ELSEWHERE),
        ),
        st.sampled_from(["", "", "restart", "reload", "forget"]),
    ),
    max_size=40,
)


@dataclass(slots=True)
class Node:
    """A node, and the GPUs in its slots."""

    now_s: float = 1000.0
    gpus: list[str] = field(default_factory=lambda: ["GPU-a", "GPU-b", "GPU-c"])  # the last one is a spare
    mig: dict[str, str] = field(default_factory=dict)

    def observations(self, step: Step) -> Iterator[Observation]:
        wait_s, late_s, what, _ = step
        self.now_s += wait_s
        at_s = self.now_s - late_s
        if what[0] in "01":
            yield from self.on_gpu(int(what[0]), what[2:], at_s)
        elif what == "boot":
            yield Observation(at_s, "boot", "node", "agent", facts=(("last_s", repr(at_s - 60.0)),))
        elif what == "gone":
            yield Observation(at_s, "gone", PORT, "sysfs", 1.0)
        else:
            check, _, value = what.partition(" ")
            entity = {"nvml": DRIVER, "ib": PORT, "disk_used": DISK}[check]
            check = "ib_link_downed" if check == "ib" else check
            yield Observation(at_s, check, entity, "host", float(value))

    def on_gpu(self, n: int, what: str, at_s: float) -> Iterator[Observation]:
        slot = SLOTS[n]
        check, _, word = what.partition(" ")
        if check == "swap":
            self.gpus[0], self.gpus[1], self.gpus[2] = self.gpus[1], self.gpus[2], self.gpus[0]
        elif check == "claim":
            self.gpus[1 - n] = self.gpus[n]
        elif check == "mig":
            self.mig[self.gpus[n]] = word
        if check in ("gpu_state", "swap", "claim", "mig"):
            gpu, state = self.gpus[n], float(word) if check == "gpu_state" else 0.0
            facts = (("uuid", gpu), ("name", A100), ("mig", self.mig.get(gpu, "off")))
            yield Observation(self.now_s, "gpu_state", slot, "nvml-polling", state, facts=facts)
        elif check in ("xid", "154"):
            code, variant = (float(word), "") if check == "xid" else (154.0, word)
            yield Observation(at_s, "xid", slot, "kmsg", code, variant)
        elif check == "variants":
            for k in range(MAX_VARIANTS + 4):
                variant = f"NETIR_LINK_DOWN Fatal {0x00200011 + (k << 7):#010x} 0x00000001"
                yield Observation(at_s + MOMENT_S * k, "xid", slot, "kmsg", 149.0, variant)
        else:
            yield Observation(at_s, check, slot, "nvml-polling", float(word or 0))


def restarted(made: Evaluator) -> Evaluator:
    again = Evaluator(POLICY)
    again.load(json.loads(json.dumps(made.dump())))
    return again


def steps(*all_steps: tuple[float, str], late_s: float = 0.0, chore: str = "restart") -> list[Step]:
    return [(wait_s, late_s, what, chore) for wait_s, what in all_steps]


LAST_ECC = (9.0, 0.0, "0 ecc_dbe 2", "")


CLEARED = steps((1.0, "0 ecc_dbe 0"), (400.0, "0 cleared"))
EXCHANGED = steps((1.0, "0 gpu_state 0"), (100.0, "boot"), (10.0, "0 xid 95"), (10.0, "0 swap"), chore="")
GONE = steps((1.0, "ib 0"), (400.0, "gone"))


@given(STEPS)
@settings(max_examples=400)
@example(steps((1.0, "nvml 2"), (30.0, "nvml 2"), (1000.0, "nvml 2"), chore="reload"))
@example(steps(*[(wait_s, "0 gpu_temperature_margin -1") for wait_s in (1.0, 15.0, 1000.0)]))
@example(steps((1.0, "0 mig off"), (1.0, "0 xid 95"), (9.0, "0 gpu_reset"), (700.0, "0 xid 13")))
@example([*CLEARED, (10.0, 20.0, "0 ecc_dbe 1", ""), (9.0, 0.0, "0 ecc_dbe 1", "")])
@example([*EXCHANGED, (31 * DAY_S, 0.0, "0 gpu_state 0", "forget"), (10.0, 0.0, "0 xid 13", "restart")])
@example([*GONE, (10.0, 290.0, "ib 0", ""), (1.0, 20.0, "ib 9", "")])
def test_a_restart_or_a_reload_at_any_moment_changes_no_verdict(all_steps: list[Step]) -> None:
    steady, other, node = Evaluator(POLICY, 575), Evaluator(POLICY, 575), Node()
    for step in all_steps:
        for each in node.observations(step):
            steady.add(each)
            other.add(each)
        chore = step[3]
        if chore == "restart":
            other = restarted(other)
        elif chore == "reload":
            other.use(replace(POLICY))
        elif chore == "forget":
            steady.forget(node.now_s - FORGET_S)
            other.forget(node.now_s - FORGET_S)
        assert other.findings(node.now_s) == steady.findings(node.now_s), step
        assert not steady.problems
        assert not other.problems
    end_s = node.now_s + LATE_S
    assert other.findings(end_s) == steady.findings(end_s)
