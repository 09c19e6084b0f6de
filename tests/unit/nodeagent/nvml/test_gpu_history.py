from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.nvml import gpu_roster, polling
from nodeagent.nvml.driver import NvmlSession
from nodeagent.nvml.gpu_roster import GpuHistory, NodeGpus
from nodeagent.sensing.counter_sum import CounterSum

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "most",
                    "driver_load",
                    "gpus",
                    "uuid",
                    "state",
                    "links",
                    "mig_links",
                    "mig",
                    "recovery",
                    "x",
                    "request_kept",
                    "required",
                    "required_kept",
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=30,
)
link_sets = st.sets(st.integers(0, 35))
counts = st.integers(0, 1 << 64)
gpus = st.builds(
    GpuHistory,
    uuid=st.text(max_size=40),
    state=st.integers(0, 4),
    links_by_mig=st.tuples(link_sets, link_sets),
    mig=st.booleans(),
    recovery=st.integers(0, 7),
    request_kept=st.booleans(),
    required=st.booleans(),
    required_kept=st.booleans(),
    nvlink_total=st.just(CounterSum())
    | st.builds(CounterSum, counts, st.dictionaries(st.text(max_size=6), counts, max_size=3)),
)
histories = st.builds(
    NodeGpus,
    most=st.integers(0, 16),
    load=st.text(max_size=20),
    gpus=st.dictionaries(st.text(max_size=12), gpus, max_size=4),
)


@given(histories)
def test_dumped_history_is_loaded(past: NodeGpus) -> None:
    assert gpu_roster.load_history(json.loads(json.dumps(past.dump()))) == past


@given(json_values)
def test_malformed_history_is_ignored(raw: object) -> None:
    past = gpu_roster.load_history(raw)
    assert gpu_roster.load_history(past.dump()) == past


def test_a_gpu_is_back_only_if_it_was_missing() -> None:
    gpu = GpuHistory("a")
    assert not gpu.take_state(gpu_roster.UNREADABLE, present=True)
    assert not gpu.take_state(gpu_roster.OK, present=True)
    assert not gpu.take_state(gpu_roster.LOST, present=True)
    assert not gpu.take_state(gpu_roster.VANISHED, present=False)
    assert gpu.take_state(gpu_roster.OK, present=True)


def test_a_missing_gpu_that_nobody_misses_any_more_is_not_back() -> None:
    gpu = GpuHistory("a", state=gpu_roster.VANISHED)
    unmissed = gpu_roster.OK, "absent, but all 7 expected GPUs are present"
    for _ in range(2):
        seen = polling.sweep_gpu(None, gpu, frozenset({"gpu_state"}), unmissed, NvmlSession(1))
        assert [(each.check, each.value) for each in seen] == [("gpu_state", gpu_roster.OK)]
    assert gpu.take_state(gpu_roster.OK, present=True), "it is back once NVML has it open"


def test_memory_of_an_agent_that_did_not_know_mig_is_of_the_mode_without_it() -> None:
    old = {"uuid": "a", "state": 0, "links": [0, 3], "uncorrected": 2.0, "recovery": 0}
    gpu = gpu_roster.load_history({"most": 8, "driver_load": "1", "gpus": {"0000:1b:00.0": old}}).gpus[
        "0000:1b:00.0"
    ]
    assert (gpu.links, gpu.mig, gpu.links_by_mig[True]) == ({0, 3}, False, set())


def test_a_volatile_counter_restarts_only_within_one_session_of_nvml() -> None:
    gpu = GpuHistory("a")
    readings = ((3, 1), (4, 1), (0, 2), (1, 2), (0, 2))
    fell = [gpu.take_uncorrected(count, session) for count, session in readings]
    assert fell == [False, False, False, False, True]


def test_the_kernels_module_load_takes_precedence_over_nvml() -> None:
    assert NodeGpus(load="1").reloaded("2", after_loss=False)
    assert not NodeGpus(load="1").reloaded("1", after_loss=True)
    assert NodeGpus().reloaded("1", after_loss=True)
    assert not NodeGpus().reloaded("1", after_loss=False)
    assert NodeGpus(load="1").reloaded("", after_loss=True)


def test_errors_that_links_count_while_a_loaded_driver_brings_them_up_are_no_growth() -> None:
    history = NodeGpus(load="1", gpus={"0000:3b:00.0": GpuHistory("GPU-1")})
    total = history.gpus["0000:3b:00.0"].nvlink_total
    assert total.add({"replay": 2}) == 2
    history.reloaded("1", after_loss=False)
    assert total.add({"replay": 5}) == 5
    history.reloaded("2", after_loss=False)
    assert total.add({"replay": 500}) == 5
    assert total.add({"replay": 501}) == 6
