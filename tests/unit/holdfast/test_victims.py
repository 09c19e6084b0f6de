from __future__ import annotations

import pytest

from holdfast.victims import lost_peers

GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:13206. This is typically caused by a remote worker crashing. Check the logs of the remote w"
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GLOO, "lost its peers (connection closed by peer)"),
        (f"Traceback\n  File x\nRuntimeError: {GLOO}\n", "lost its peers (connection closed by peer)"),
        ("a\nDistBackendError: NCCL error 6" + "x" * 200, "lost its peers (DistBackendError: NCCL error 6"),
        ("", "lost its peers"),
    ],
)
def test_what_torch_says_of_a_dead_peer_becomes_a_few_words(text: str, says: str) -> None:
    assert lost_peers(text).startswith(says)
    assert len(lost_peers(text)) <= 100
