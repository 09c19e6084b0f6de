from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.nvml import gpu_roster
from nodeagent.nvml.gpu_roster import GpuHistory, NodeGpus

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["most", "driver_load", "gpus", "uuid", "state", "links", "uncorrected", "recovery", "x"]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=30,
)
gpus = st.builds(
    GpuHistory,
    uuid=st.text(max_size=40),
    state=st.integers(0, 4),
    links=st.sets(st.integers(0, 35)),
    uncorrected=st.none() | st.integers(0, 1 << 40).map(float),
    recovery=st.integers(0, 7),
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
    assert not gpu.take_state(gpu_roster.UNREADABLE)
    assert not gpu.take_state(gpu_roster.OK)
    assert not gpu.take_state(gpu_roster.LOST)
    assert not gpu.take_state(gpu_roster.VANISHED)
    assert gpu.take_state(gpu_roster.OK)


def test_the_kernels_module_load_takes_precedence_over_nvml() -> None:
    assert NodeGpus(load="1").reloaded("2", after_loss=False)
    assert not NodeGpus(load="1").reloaded("1", after_loss=True)
    assert NodeGpus().reloaded("1", after_loss=True)
    assert not NodeGpus().reloaded("1", after_loss=False)
    assert NodeGpus(load="1").reloaded("", after_loss=True)
