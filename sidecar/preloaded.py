"""Prepare a process in which sidecars are forked: all modules are imported, and all messages prepared."""

from __future__ import annotations

from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import LauncherOrder, LauncherState
from holdfast.protocol.member_messages import KnownHistory, MemberOrder, MemberReport
from sidecar import fencing, reconciler
from sidecar.state import peers

__all__ = ["fencing", "peers", "reconciler"]

codec.prepare(fencing.OrderVersion, KnownHistory, LauncherState, LauncherOrder, MemberReport, MemberOrder)
