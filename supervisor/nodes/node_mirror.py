"""One mirror of the Nodes for all observers in this process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from supervisor.kubernetes.client import NODES, KubernetesObject
from supervisor.kubernetes.watch import Changed, Mirror, ObjectName, Watchable
from supervisor.nodes import node_objects


class NodeMirror:
    """Mirrors the Nodes, and calls each observer after a change, as `Mirror` calls its only observer."""

    def __init__(
        self,
        server: Watchable,
        *,
        labels: str = "",
        kept_labels: Iterable[str] = (),
        kept_conditions: Iterable[str] = (),
    ) -> None:
        """`labels` selects nodes. The other two name parts to keep besides those of `node_objects.prune`."""
        kept = (*kept_labels,), (*kept_conditions,)
        self._observers: list[Changed] = []
        self._mirror = Mirror(
            server, NODES, self._note, labels=labels, prune=lambda found: node_objects.prune(found, *kept)
        )
        self.objects = self._mirror.objects
        self.synced = self._mirror.synced  # set when all nodes are known

    def observe(self, changed: Changed) -> None:
        """Call `changed` for each later change, after the observers that were added earlier."""
        self._observers.append(changed)

    async def run(self) -> NoReturn:
        """Keep the mirror up to date. Never returns."""
        await self._mirror.run()

    def _note(self, name: ObjectName, old: KubernetesObject | None, new: KubernetesObject | None) -> None:
        for each in self._observers:
            each(name, old, new)
