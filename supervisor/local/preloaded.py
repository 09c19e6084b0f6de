"""Prepare a process in which supervisors are forked: all modules are imported, and all messages prepared."""

from __future__ import annotations

from holdfast.protocol import codec
from holdfast.protocol.member_messages import MemberOrder, MemberReport
from supervisor.local import keeper_messages, serve
from supervisor.view.model import JobState, Policy, View

__all__ = ["serve"]

codec.prepare(Policy, JobState, View, MemberReport, MemberOrder, keeper_messages.KeeperState)
