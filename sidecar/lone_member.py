"""End a pod whose ranks need a supervisor if none takes over. `sidecar.watch.unsupervised` decides when."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast.protocol.launcher_messages import LauncherOrder, LauncherState
from sidecar.watch import unsupervised
from sidecar.watch.unsupervised import LoneWait

log = logging.getLogger(__name__)


class LoneMember:
    """Waits for a supervisor on behalf of ranks that need one, and logs when the wait begins and ends.

    An order to end cannot be withdrawn. A supervisor that connects too late sees the container end, as when
    any other member is lost.
    """

    def __init__(self, send: Callable[[LauncherOrder], None]) -> None:
        """`send` sends an order to the launcher.

        It is called until the launcher's state reflects the order.
        """
        self._send = send
        self._wait: LoneWait | None = None
        self._is_over = False  # the current wait has ended without a supervisor
        self._has_warned = False  # whether the warning that no rank can start was logged

    def poll(
        self,
        state: LauncherState | None,
        alone_since_s: float | None,
        grace_s: float,
        now_s: float,
        lateness_s: float,
    ) -> None:
        """Order the launcher to end once the wait has ended. See `unsupervised.later` for the arguments.

        Ranks that are already ending have `grace_s` to do so.
        """
        before = self._wait
        wait = self._wait = unsupervised.later(before, state, alone_since_s, now_s, lateness_s)
        if wait is None:
            if before is not None and not self._is_over:
                log.warning("wait for a supervisor is over", extra={"supervised": alone_since_s is None})
            self._is_over = False
            self._warn_unstarted(state, alone_since_s, now_s)
            return
        if before is None:
            log.warning(
                "no supervisor: the ranks have ended or are frozen, and wait for orders",
                extra={"limit_s": unsupervised.LIMIT_S, "exit_code": wait.exit_code},
            )
        if wait.left_s(now_s) > 0:
            return
        if not self._is_over:
            self._is_over = True
            log.error(
                "no supervisor has connected: the training container ends",
                extra={"limit_s": unsupervised.LIMIT_S, "exit_code": wait.exit_code},
            )
        self._send(LauncherOrder("stop", grace_s=grace_s, ending_only=True, exit_code=wait.exit_code))

    def _warn_unstarted(self, state: LauncherState | None, alone_since_s: float | None, now_s: float) -> None:
        """Log once that no rank can start because there has been no supervisor for too long."""
        is_unstarted = state is not None and not state.ranks and not state.stopped
        is_late = alone_since_s is not None and now_s - alone_since_s >= unsupervised.LIMIT_S
        if is_unstarted and is_late and not self._has_warned:
            log.warning("no supervisor: no rank can start", extra={"limit_s": unsupervised.LIMIT_S})
        self._has_warned = is_unstarted and is_late
