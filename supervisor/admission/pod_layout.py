"""Define the names, paths and keys of an injected pod and of the installation. Pure.

The injector writes them. The sidecar, the cluster's supervisor, the commands that examine a pod, and the
documentation share these definitions.

```text
initContainers
  ...                 the user's, and those of other injectors
  holdfast-setup      copies Holdfast and py-spy to /opt/holdfast, then exits
  holdfast-sidecar    runs as long as the pod (restartPolicy: Always)
containers
  NAME                trains; its command starts the launcher, which starts the ranks
volumes
  holdfast-code         /opt/holdfast                         setup, training
  holdfast-memory       /run/holdfast                         sidecar, training: sockets, progress, snapshots
  holdfast-checkpoints  /var/lib/holdfast/checkpoints         sidecar, training
  holdfast-identity     /var/run/secrets/holdfast.dev         sidecar only: a token that the supervisor checks
```
"""

from __future__ import annotations

from holdfast.protocol import defaults

PREFIX = "holdfast.dev/"

# Annotations that the user sets. `supervisor.admission.settings` has the annotations for options of `holdfast
# run`.
INJECT = PREFIX + "inject"
CONTAINER = PREFIX + "container"
MEMBERS = PREFIX + "members"
NPROC_PER_NODE = PREFIX + "nproc-per-node"
GROUP = PREFIX + "group"
CHECKPOINTS = PREFIX + "checkpoints"
CHECKPOINTS_SECRET = PREFIX + "checkpoints-secret"
STATE_SIZE = PREFIX + "state-size"

# The maximum number of ranks in a job. At this size, a recovery takes more than a second of CPU time in the
# supervisor, which all jobs share, and the job's state takes up almost half of its Supervision.
MAX_JOB_RANKS = 32_768

# Annotations that the injector sets: what it injected, as JSON, or why it injected nothing.
INJECTED = PREFIX + "injected"
# characters and values of that JSON, which users can change
MAX_INJECTED, MAX_INJECTED_VALUES = 16_384, 1_000
NOT_INJECTED = PREFIX + "not-injected"

# The webhook's warning in a dry run. The API server sends it even if it refuses the injected pod afterwards,
# for example because of a quota.
WOULD_INJECT = "this is a dry run; the pod would be injected"

# The supervisor finds the injected pods by this label.
MEMBER_LABEL = PREFIX + "member"
IS_MEMBER = "true"
STANDBY_OF = PREFIX + "standby-of"  # a label of standby pods, which the supervisor creates

NAMESPACE = "holdfast-system"
SUPERVISOR_SERVICE = "holdfast-supervisor"
SUPERVISOR_PORT = 8443
SUPERVISOR_LEASE = "holdfast-supervisor"  # the replica that holds it leads
SUPERVISOR_URL = f"https://{SUPERVISOR_SERVICE}.{NAMESPACE}.svc:{SUPERVISOR_PORT}"
AUDIENCE = "holdfast.dev"  # for tokens that prove the identity of pods to the supervisor

# Containers
SETUP = "holdfast-setup"
SIDECAR = "holdfast-sidecar"
CONTAINERS = (SETUP, SIDECAR)
TRAINING_NAMES = ("pytorch", "tensorflow", "main", "trainer")  # conventional names of the training container
PROXIES = ("istio-proxy", "linkerd-proxy")  # containers of service meshes, which never train

# Volumes
CODE_VOLUME = "holdfast-code"
MEMORY_VOLUME = "holdfast-memory"
IDENTITY_VOLUME = "holdfast-identity"
CHECKPOINT_VOLUME = "holdfast-checkpoints"
VOLUMES = (CODE_VOLUME, MEMORY_VOLUME, IDENTITY_VOLUME, CHECKPOINT_VOLUME)

# Mount paths and contents of the volumes
CODE = "/opt/holdfast"
LIBRARY = CODE + "/lib"  # the only directory that is added to the Python path of the training
PY_SPY = CODE + "/bin/py-spy"
MEMORY = defaults.MEMBER_DIRECTORY
LOGS = defaults.MEMBER_LOGS
CHECKPOINT_DIRECTORY = "/var/lib/holdfast/checkpoints"
IDENTITY = "/var/run/secrets/holdfast.dev"
TOKEN = "token"  # the name of the token's file in `IDENTITY`
TOKEN_FILE = f"{IDENTITY}/{TOKEN}"
TOKEN_S = 3600  # the lifetime of a token; the kubelet replaces it after 80 % of this time
TRAINING_MOUNTS = {CODE_VOLUME: CODE, MEMORY_VOLUME: MEMORY, CHECKPOINT_VOLUME: CHECKPOINT_DIRECTORY}

# Commands in Holdfast's image
SETUP_ARGS = ("holdfast", "install-runtime", CODE)
SIDECAR_ARGS = ("holdfast", "sidecar")

# The sidecar touches this file every few seconds while its event loop runs. The probe fails when the file is
# more than a minute old. The kubelet restarts the sidecar at least a minute later, because on a busy node a
# healthy sidecar can be slow. The probe checks a file and not a port, because pods in the host's network
# share ports, and it does not start Python. If the file is missing, the probe succeeds, because the sidecar
# may be starting.
ALIVE = MEMORY + "/alive"
ALIVE_PROBE = {
    "exec": {"command": ["sh", "-c", f'test -z "$(find {ALIVE} -mmin +1)"']},
    "initialDelaySeconds": 60,
    "periodSeconds": 30,
    "timeoutSeconds": 20,
    "failureThreshold": 3,
}

# Variables that the kubelet sets, and the fields of the pod that it takes their values from. The
# `HOLDFAST_*` variables are in `holdfast.protocol.environment`.
POD_NAME = "POD_NAME"
POD_UID = "POD_UID"
POD_NAMESPACE = "POD_NAMESPACE"
POD_IP = "POD_IP"
NODE_NAME = "NODE_NAME"
FIELDS = {
    POD_NAME: "metadata.name",
    POD_UID: "metadata.uid",
    POD_NAMESPACE: "metadata.namespace",
    POD_IP: "status.podIP",
    NODE_NAME: "spec.nodeName",
}
MEMBER = f"$({POD_NAME}).$({POD_UID})"  # the member's name; Kubernetes expands both variables
STORAGE_REPORTED = "reported"  # the sidecar reports the checkpoints, because the supervisor cannot read them

KUEUE = "kueue.x-k8s.io/"  # the prefix of Kueue's labels and annotations
KUEUE_QUEUE = KUEUE + "queue-name"

GPU_RESOURCE = "nvidia.com/gpu"
ACCELERATORS = ("/gpu", "/tpu", "/neuron", "/gaudi")  # suffixes of resources that only training requests
NO_GPUS = ("NVIDIA_VISIBLE_DEVICES", "void")  # without this, NVIDIA's runtime gives a container all GPUs

# How long a pod remains on a node that does not respond. The cluster's default is 300 s.
AWAY_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
AWAY_S = 30
DEFAULT_AWAY_S = 300

# Annotations of pods that the kubelet creates from files. Webhooks cannot change such pods.
STATIC_POD_ANNOTATIONS = ("kubernetes.io/config.mirror", "kubernetes.io/config.source")
SYSTEM_NAMESPACES = ("kube-system", "kube-public", "kube-node-lease", NAMESPACE)


def member_name(pod: str, uid: str) -> str:
    """Return the name of a pod's member, in the form that `MEMBER` defines."""
    return f"{pod}.{uid}"
