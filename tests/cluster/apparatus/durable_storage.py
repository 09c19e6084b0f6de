"""A volume that outlives pods, on one node of any cluster: a hostPath behind a claim."""

from __future__ import annotations

import json

from tests.cluster.apparatus.kubernetes_cluster import ClusterUnderTest, Json

CLAIM = "checkpoints"
READY_S = 60.0


class DurableStorage:
    """A claim in a namespace. Its volume is a directory on one node, which every user may write."""

    def __init__(self, cluster: ClusterUnderTest, namespace: str) -> None:
        """`namespace` must admit pods that run as root, because such a pod creates the directory."""
        self._cluster, self._namespace = cluster, namespace
        self.node = _first_node(cluster)
        self._volume = f"holdfast-{namespace}"

    def make(self) -> None:
        """Create the volume and the claim, and return once pods can write there."""
        for made in (self._volume_object(), self._claim_object()):
            self._cluster.kubectl("apply", "-n", self._namespace, "-f", "-", text=json.dumps(made))
        self._run("chmod 0777 /checkpoints")

    def remove(self) -> None:
        """Remove the files and the volume. The claim is deleted with its namespace."""
        self._run("rm -rf /checkpoints/*")
        self._cluster.kubectl("delete", "pv", self._volume, "--wait=false", "--ignore-not-found")

    def _run(self, command: str) -> None:
        """Run a shell command as root in a pod that has the volume at /checkpoints."""
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "storage"},
            "spec": {
                "nodeName": self.node,
                "restartPolicy": "Never",
                "containers": [
                    {
                        "name": "storage",
                        "image": "holdfast-trainer:dev",
                        "imagePullPolicy": "IfNotPresent",
                        "command": ["sh", "-c", command],
                        "securityContext": {"runAsUser": 0},
                        "volumeMounts": [{"name": "checkpoints", "mountPath": "/checkpoints"}],
                    }
                ],
                "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": CLAIM}}],
            },
        }
        there = ("-n", self._namespace)
        self._cluster.kubectl("apply", *there, "-f", "-", text=json.dumps(pod))
        succeeded = "jsonpath={.status.phase}=Succeeded"
        self._cluster.wait(succeeded, "pod/storage", namespace=self._namespace, limit_s=READY_S)
        self._cluster.kubectl("delete", "pod", "storage", *there, "--now")

    def _volume_object(self) -> Json:
        hostname = {"key": "kubernetes.io/hostname", "operator": "In", "values": [self.node]}
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": self._volume},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": self._namespace, "name": CLAIM},
                "hostPath": {"path": f"/tmp/{self._volume}", "type": "DirectoryOrCreate"},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [hostname]}]}},
            },
        }

    def _claim_object(self) -> Json:
        return {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CLAIM},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeName": self._volume,
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }


def _first_node(cluster: ClusterUnderTest) -> str:
    """Return the name of a node that takes new pods."""
    nodes = cluster.read("/api/v1/nodes")["items"]
    free = [each["metadata"]["name"] for each in nodes if not each["spec"].get("taints")]
    return str(sorted(free)[-1])
