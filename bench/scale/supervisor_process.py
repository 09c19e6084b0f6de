"""Run the supervisor of a cluster, unchanged except for its two ports, which are fixed in a pod."""

from __future__ import annotations

import sys

from supervisor.admission import pod_layout
from supervisor.cluster import main as cluster_main


def main(member_port: int, health_port: int) -> int:
    pod_layout.SUPERVISOR_PORT = member_port
    cluster_main.HEALTH_PORT = health_port
    return cluster_main.main()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
