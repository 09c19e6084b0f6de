"""A step that a lost peer has spoiled is neither written nor counted, even if the script continues it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from holdfast.errors import PeerLost
from holdfast.training.caught_errors import CaughtErrorCheck, PeerConnections, open_sockets


class Group:
    """Both ends of a connection between this rank and a peer; `frozen` counts the waits for a stop."""

    def __init__(self) -> None:
        before = open_sockets()
        self.mine, self.peer = socket.socketpair()
        self.asked = 0
        self.peers = PeerConnections({self.mine.fileno(): os.fstat(self.mine.fileno()).st_ino})
        assert set(open_sockets()) - set(before) == {self.mine.fileno(), self.peer.fileno()}
        self.caught = CaughtErrorCheck(self.peers, self.frozen)

    def frozen(self) -> bool:
        self.asked += 1
        return True


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group()
    yield made
    made.mine.close()
    made.peer.close()


def step(*, fails: bool = False) -> None:
    """Make a backward pass; with `fails`, it raises, and the error is caught."""
    weight = torch.ones(2, requires_grad=True)
    loss = weight.sum()
    if fails:
        loss.register_hook(_fail)
    with pytest.raises(RuntimeError, match="closed by peer") if fails else nullcontext():
        loss.backward()


def _fail(_: torch.Tensor) -> None:
    raise RuntimeError("Connection closed by peer")


def test_while_all_peers_are_connected_every_step_is_made(group: Group) -> None:
    step(fails=True)
    group.caught.writes(0)
    group.caught.commits(0, written=False)
    group.caught.committed()
    group.caught.commits(1, written=False)
    assert group.asked == 0


@pytest.mark.parametrize("whose", ["theirs", "mine", "another's"])
def test_a_failed_pass_is_neither_written_nor_counted_once_a_peer_is_lost(group: Group, whose: str) -> None:
    step(fails=True)
    (group.peer if whose == "theirs" else group.mine).close()
    taken = socket.socket() if whose == "another's" else None  # it reuses the closed descriptor
    with pytest.raises(PeerLost, match="step 3: the optimizer would update"):
        group.caught.writes(3)
    for written in (True, False):
        with pytest.raises(PeerLost, match="step 3: the step would be counted"):
            group.caught.commits(3, written=written)
    if taken is not None:
        taken.close()


def test_a_step_with_complete_passes_is_made_although_a_peer_is_lost(group: Group) -> None:
    for number in range(2):
        step()
        group.caught.writes(number)
        group.caught.commits(number, written=True)
        group.caught.committed()
        group.peer.close()
    assert group.asked == 0


def test_a_step_without_an_update_or_with_fewer_passes_waits_to_be_stopped(group: Group) -> None:
    step()
    group.caught.writes(0)
    group.caught.committed()
    group.peer.close()
    group.caught.writes(1)
    assert group.asked == 1
    group.caught.commits(1, written=False)
    assert group.asked == 1, "it must not wait for a connection to a lost peer"


def test_without_a_stop_the_script_continues(group: Group) -> None:
    caught = CaughtErrorCheck(group.peers, lambda: False, hold_s=0.05)
    group.peer.close()
    caught.commits(0, written=False)


def test_a_failed_collective_spoils_later_writes(group: Group) -> None:
    step()
    group.caught.writes(0)
    group.caught.committed()
    step()
    with pytest.raises(ValueError, match="not been initialized"):
        dist.all_reduce(torch.ones(1))
    group.peer.close()
    with pytest.raises(PeerLost, match="step 1: the optimizer"):
        group.caught.writes(1)
    group.caught.commits(1, written=True)  # the collective reduced the loss, after the update
    with pytest.raises(PeerLost, match="step 1: the step would"):
        group.caught.commits(1, written=False)
