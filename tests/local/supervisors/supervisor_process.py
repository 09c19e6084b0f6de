"""Run the supervisor of a cluster, unchanged except for its ports and for how it finds the other one.

python -m tests.local.supervisors.supervisor_process MEMBER_PORT HEALTH_PORT OTHERS_MEMBER_PORT

In a cluster, the ports of all replicas are the same, and a Service knows their addresses.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from supervisor.admission import pod_layout
from supervisor.cluster import main as cluster_main
from supervisor.kubernetes.certificates import ServerCertificate
from supervisor.kubernetes.replicas import Replicas

OTHER = "127.0.0.2"  # the same machine, at an address other than POD_IP


async def addresses(_service: str) -> Sequence[str]:
    return [OTHER]


def replicas(
    others_port: int, service: str, _port: int, own: str, certificate: ServerCertificate, **others: object
) -> Replicas:
    return Replicas(service, others_port, own, certificate, addresses, **others)  # type: ignore[arg-type]


def main(member_port: int, health_port: int, others_port: int) -> int:
    pod_layout.SUPERVISOR_PORT = member_port
    cluster_main.HEALTH_PORT = health_port
    cluster_main.Replicas = partial(replicas, others_port)  # type: ignore[assignment, attr-defined]
    return cluster_main.main()


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:4])))
