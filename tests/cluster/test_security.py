"""Members prove which pod they are. Both programs have the rights that they need, and no more."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import pytest

from supervisor.admission.pod_layout import AUDIENCE, TOKEN_FILE
from supervisor.cluster import main as supervising
from supervisor.cluster.adoption.job_membership import JobKey
from supervisor.cluster.pod_server import job_secret
from supervisor.cluster.supervision.contents import SUPERVISIONS, RunSize
from supervisor.cluster.supervision.resource import SupervisionResource, Takeover, ensure_resource
from supervisor.kubernetes import certificates
from supervisor.kubernetes.certificates import AuthoritySecret
from supervisor.kubernetes.client import ResourceKind, connect
from supervisor.store.run_lead import Deposed
from tests.cluster.apparatus.kubernetes_cluster import (
    AGENT,
    NODES,
    PROGRAMS,
    SUPERVISOR,
    SYSTEM,
    WEBHOOK,
    ClusterUnderTest,
    Json,
)
from tests.cluster.apparatus.namespaces import Namespaces
from tests.cluster.apparatus.training_job import TrainingJob
from tests.samples.documented_rights import documented_rights

HOST = f"{SUPERVISOR}.{SYSTEM}.svc"
STATEFUL_SETS = ResourceKind("apps", "v1", "statefulsets")
EVENTS = ("get", "events", "-o", "json", "-n")

# Asks for a member's connection as a sidecar does, and prints the status of the leader's answer.
_CONNECT = """
import http.client, json, socket, ssl, sys
given = json.load(sys.stdin)
tls = ssl.create_default_context(cadata=given["ca"])
asked = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
         "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
if given["token"] is not None:
    asked["Authorization"] = "Bearer " + given["token"]

def answer(address):
    connection = http.client.HTTPSConnection(given["host"], 8443, context=tls)
    plain = socket.create_connection((address, 8443), timeout=20)
    connection.sock = tls.wrap_socket(plain, server_hostname=given["host"])
    connection.request("GET", "/v1/member", headers=asked)
    answer = connection.getresponse()
    return answer.status, "" if answer.status == 101 else answer.read().decode()

for address in sorted({each[4][0] for each in socket.getaddrinfo(given["host"], 8443)}):
    try:
        status, said = answer(address)
    except ssl.SSLCertVerificationError as error:
        status, said = 0, error.verify_message
    if "does not lead" not in said:
        break
print(status, said)
"""

# Connects as one member and, for three seconds, reports in another member's name that its launcher is lost.
_PRETEND = """
import asyncio, json, socket, ssl, sys, time
import aiohttp
from holdfast.protocol import codec
from holdfast.protocol.member_messages import PROTOCOL, MemberReport
given = json.load(sys.stdin)

async def main():
    headers = {"Authorization": "Bearer " + given["token"]}
    tls = ssl.create_default_context(cadata=given["ca"])
    limit = aiohttp.ClientWSTimeout(ws_close=1.0)
    async with aiohttp.ClientSession(headers=headers) as session:
        for address in {each[4][0] for each in socket.getaddrinfo(given["host"], 8443)}:
            url = f"https://{address}:8443/v1/member"
            try:
                line = await session.ws_connect(url, ssl=tls, server_hostname=given["host"], timeout=limit)
                break
            except aiohttp.WSServerHandshakeError:  # this one does not lead
                continue
        for sequence in range(1, 16):
            report = MemberReport(
                protocol=PROTOCOL, member=given["member"], node="nowhere", sidecar_pid=1, sequence=sequence,
                now_ns=time.monotonic_ns(), nproc=1, launcher=None, peer_url="http://192.0.2.1:1",
            )
            await line.send_str(codec.encode(report).decode())
            await asyncio.sleep(0.2)
        print("closed" if line.closed else "connected")
        await line.close()

asyncio.run(main())
"""


# Prints what members of a pod's job could leak: its identity token, the arguments of all processes of the
# container, and the answers of its servers to a request with the job's secret, and to one without it.
_INSIDE = """
import json, os, socket, struct, sys, urllib.error, urllib.request
given = json.load(sys.stdin)

def status(url, headers):
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0

answers = []
for line in open("/proc/net/tcp").readlines()[1:]:
    words = line.split()
    if words[3] == "0A":
        host, port = words[1].split(":")
        address = socket.inet_ntoa(struct.pack("<I", int(host, 16)))
        url = f"http://{address}:{int(port, 16)}/v1/private/0/1/1"
        answers.append([status(url, {"Authorization": "Bearer " + given["secret"]}), status(url, {})])
arguments = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        arguments.append(open(f"/proc/{pid}/cmdline").read())
    except OSError:
        pass
print(json.dumps({"token": open(given["token"]).read(), "arguments": arguments, "answers": answers}))
"""


@dataclass(frozen=True)
class Client:
    """An unsupervised pod with programs that connect to the supervisor."""

    cluster: ClusterUnderTest
    namespace: str
    ca: str

    def run(self, program: str, token: str | None, **given: str) -> str:
        content = {"host": HOST, "ca": self.ca, "token": token, **given}
        inside = ("exec", "-i", "-n", self.namespace, "client", "--", "python", "-c", program)
        return self.cluster.kubectl(*inside, text=json.dumps(content))

    def connect(self, token: str | None, **given: str) -> tuple[int, str]:
        """Return the status and the text of the supervisor's response."""
        status, _, said = self.run(_CONNECT, token, **given).partition(" ")
        return int(status), said.strip()


@pytest.fixture(scope="module")
def client(installed: ClusterUnderTest, namespaces: Namespaces) -> Client:
    namespace = namespaces.make()
    make_pod(installed, namespace, "client")
    installed.wait("condition=Ready", "pod/client", namespace=namespace)
    return Client(installed, namespace, authority(installed))


def authority(cluster: ClusterUnderTest) -> str:
    """Return the certificates that verify the supervisor."""
    path = 'go-template={{index .data "ca.crt" | base64decode}}'
    return cluster.kubectl("get", "secret", "holdfast-ca", "-n", SYSTEM, "-o", path)


def make_pod(cluster: ClusterUnderTest, namespace: str, name: str, **spec: object) -> None:
    container = {
        "name": "sleep",
        "image": "holdfast:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "terminationGracePeriodSeconds": 0,
            "containers": [container],
            **spec,
        },
    }
    cluster.kubectl("create", "-n", namespace, "-f", "-", text=json.dumps(pod))


def token_of(cluster: ClusterUnderTest, namespace: str, pod: str, audience: str = AUDIENCE) -> str:
    """Return a token as the kubelet gives it to `pod`; if `pod` is "", the token is not bound to a pod."""
    bound: tuple[str, ...] = ()
    if pod:
        uid = cluster.read(f"/api/v1/namespaces/{namespace}/pods/{pod}")["metadata"]["uid"]
        bound = ("--bound-object-kind=Pod", f"--bound-object-name={pod}", f"--bound-object-uid={uid}")
    audiences = (f"--audience={audience}",) if audience else ()
    return cluster.kubectl("create", "token", "default", "-n", namespace, *audiences, *bound).strip()


def test_a_request_without_a_token_is_refused(client: Client) -> None:
    assert client.connect(None)[0] == 401


def test_a_malformed_token_is_refused(client: Client) -> None:
    assert client.connect("a.b.c")[0] == 401
    assert client.connect("x" * 5000)[0] == 401


@pytest.mark.parametrize("audience", ["", "vault"], ids=["of the API server", "of another program"])
def test_a_token_for_another_audience_is_refused(client: Client, audience: str) -> None:
    """A pod's token that was issued for another purpose does not make its holder a member."""
    status, said = client.connect(token_of(client.cluster, client.namespace, "client", audience))
    assert status == 401, said


def test_a_token_that_belongs_to_no_pod_is_refused(client: Client) -> None:
    status, said = client.connect(token_of(client.cluster, client.namespace, ""))
    assert (status, "not bound to a pod" in said) == (401, True), said


def test_a_pod_that_is_no_member_is_turned_away(client: Client) -> None:
    """The answer does not say that it is refused, because the supervisor may not have seen the pod yet."""
    status, said = client.connect(token_of(client.cluster, client.namespace, "client"))
    assert (status, "is not a member of a job" in said) == (503, True), said


def test_the_token_of_a_deleted_pod_is_refused(client: Client) -> None:
    make_pod(client.cluster, client.namespace, "deleted")
    token = token_of(client.cluster, client.namespace, "deleted")
    gone = ("delete", "pod", "deleted", "-n", client.namespace, "--grace-period=0", "--force")
    client.cluster.kubectl(*gone)

    def look() -> str | None:
        status, said = client.connect(token)
        return said if status == 401 else None

    client.cluster.until(look, "the API server refuses the token", client.namespace, limit_s=60.0)


def test_a_server_with_a_certificate_of_another_authority_is_refused(client: Client) -> None:
    """This client trusts the API server's authority, as a client with a wrong HOLDFAST_CA would."""
    config = client.cluster.kubectl("get", "cm", "-n", client.namespace, "kube-root-ca.crt", "-o", "json")
    status, said = client.connect("a.b.c", ca=json.loads(config)["data"]["ca.crt"])
    assert status == 0, said
    assert "certificate" in said or "issuer" in said


def test_a_member_cannot_speak_for_a_member_of_another_job(
    job: TrainingJob, client: Client, namespaces: Namespaces
) -> None:
    """The supervisor uses the identity that the token proves, regardless of the name in the reports."""
    before = job.observe()
    namespace = namespaces.make()
    text = json.dumps(pretender())
    client.cluster.kubectl("create", "-n", namespace, "-f", "-", text=text)
    victim = next(each["name"] for each in job.view()["members"] if 1 in each["ranks"])
    token = token_of(client.cluster, namespace, "gpt-0")

    def look() -> bool | None:
        return True if client.connect(token)[0] == 101 else None

    client.cluster.until(look, "the supervisor knows the other job", namespace, limit_s=60.0)
    assert client.run(_PRETEND, token, member=victim) == "connected\n"
    job.trains()
    assert job.observe() == before
    members = {each["name"] for each in job.view()["members"] if each["connected"]}
    assert victim in members


def pretender() -> Json:
    """Return a pod of another job that is never scheduled, so that only the test can report for it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "gpt-0",
            "annotations": {
                "holdfast.dev/inject": "true",
                "holdfast.dev/group": "gpt",
                "holdfast.dev/members": "1",
            },
        },
        "spec": {
            "nodeSelector": {"holdfast.dev/nowhere": "true"},
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "trainer",
                    "image": "holdfast-trainer:dev",
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python", "-m", "trainer.gpt"],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }


# -- secrets


async def test_no_secret_is_in_a_log_in_arguments_or_in_a_resource(
    job: TrainingJob, installed: ClusterUnderTest
) -> None:
    """The secrets are the members' tokens and the authority's key, from which jobs' secrets are derived."""
    async with await connect() as server:
        authorities = await AuthoritySecret(server, SYSTEM).load()
        owner = await server.get(STATEFUL_SETS, "gpt", job.namespace)
    key = JobKey(job.namespace, "gpt", owner["metadata"]["uid"], "StatefulSet", "apps/v1", "gpt")
    secret = job_secret(supervising._secret(authorities), key)
    lines = certificates.encode(authorities)["ca.key"].splitlines()
    secrets = [secret, *(line for line in lines if len(line) > 40)]
    seen = [json.dumps(job.status()), json.dumps(job.pods()), job.cluster.kubectl(*EVENTS, job.namespace)]
    for pod in job.pods():
        name = pod["metadata"]["name"]
        inside = ("exec", "-i", "-n", job.namespace, name, "-c")
        found = json.loads(
            installed.kubectl(
                *inside, "holdfast-sidecar", "--", "python", "-c", _INSIDE,
                text=json.dumps({"secret": secret, "token": TOKEN_FILE}),
            )
        )  # fmt: skip
        assert [404, 401] in found["answers"], "the members do not use this secret"
        secrets.append(found["token"])
        seen += found["arguments"]
        seen.append(installed.kubectl(*inside, job.container, "--", "sh", "-c", "cat /proc/[0-9]*/cmdline"))
        seen += [job.cluster.log(job.namespace, name, each) for each in ("holdfast-sidecar", job.container)]
    for pod in installed.read(f"/api/v1/namespaces/{SYSTEM}/pods")["items"]:
        (container,) = pod["spec"]["containers"]
        seen.append(installed.log(SYSTEM, pod["metadata"]["name"], container["name"]))
    assert all(len(each) > 40 for each in secrets)
    assert not [(each, text[:200]) for each in secrets for text in seen if each in text]


# -- rights

ANY = "some-namespace"  # of users
# account, verb, group/resource[/subresource], namespace ("" for the whole cluster), name
MAY_NOT = (
    *((each, "get", "/secrets", SYSTEM, "other") for each in PROGRAMS),
    *((each, verb, "/secrets", SYSTEM, "") for each in PROGRAMS for verb in ("list", "watch", "delete")),
    *((each, verb, "/secrets", ANY, "") for each in PROGRAMS for verb in ("get", "list", "create")),
    *((each, verb, "/pods", ANY, "") for each in PROGRAMS for verb in ("update", "patch")),
    *((WEBHOOK, verb, "/pods", ANY, "") for verb in ("create", "delete")),
    *((each, "create", "/pods/exec", ANY, "") for each in PROGRAMS),
    *((each, verb, "/nodes", "", "") for each in PROGRAMS for verb in ("create", "update", "delete")),
    *((each, "create", "/serviceaccounts/token", ANY, "") for each in PROGRAMS),
    *((each, "impersonate", "/users", "", "") for each in PROGRAMS),
    *((each, "escalate", "rbac.authorization.k8s.io/clusterroles", "", "") for each in PROGRAMS),
    *((each, "*", "*/*", "", "") for each in PROGRAMS),
    (SUPERVISOR, "patch", "batch/jobs", ANY, ""),
    (SUPERVISOR, "update", "coordination.k8s.io/leases", SYSTEM, "other"),
    (SUPERVISOR, "patch", "admissionregistration.k8s.io/mutatingwebhookconfigurations", "", WEBHOOK),
    (WEBHOOK, "list", "/pods", "", ""),
    (WEBHOOK, "get", "/pods", ANY, ""),
    (WEBHOOK, "create", "/pods/eviction", ANY, ""),
    (WEBHOOK, "patch", "admissionregistration.k8s.io/mutatingwebhookconfigurations", "", "other"),
    (WEBHOOK, "get", "holdfast.dev/supervisions", ANY, ""),
)

Right = tuple[str, str, str, str, str]


def allowed(cluster: ClusterUnderTest, rights: tuple[Right, ...]) -> list[Right]:
    """Return the rights among `rights` that the API server grants."""
    answers = answers_to(cluster, map(review, rights))
    return [right for right, answer in zip(rights, answers, strict=True) if answer]


def answers_to(cluster: ClusterUnderTest, reviews: Iterable[Json]) -> list[bool]:
    text = "\n".join(map(json.dumps, reviews))
    path = "jsonpath={.status.allowed}{'\\n'}"
    return [each == "true" for each in cluster.kubectl("create", "-f", "-", "-o", path, text=text).split()]


def review(right: Right) -> Json:
    account, verb, path, namespace, name = right
    group, _, resource = path.partition("/")
    return review_of(service_account(account), verb, group, resource, namespace, name)


def service_account(name: str, namespace: str = SYSTEM) -> str:
    return f"system:serviceaccount:{namespace}:{name}"


def review_of(user: str, verb: str, group: str, resource: str, namespace: str, name: str) -> Json:
    """Return the question that `kubectl auth can-i` asks the API server."""
    resource, _, subresource = resource.partition("/")
    asked = {"verb": verb, "group": group, "resource": resource, "subresource": subresource}
    groups = ["system:authenticated"]
    if user.startswith("system:serviceaccount:"):
        groups += ["system:serviceaccounts", f"system:serviceaccounts:{user.split(':')[2]}"]
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": user,
            "groups": groups,
            "resourceAttributes": {**asked, "namespace": namespace, "name": name},
        },
    }


def test_each_role_has_exactly_the_rights_in_the_documentation(
    installed: ClusterUnderTest, namespace: str
) -> None:
    users = {
        "supervisor": service_account(SUPERVISOR),
        "webhook": service_account(WEBHOOK),
        "nodeagent": service_account(AGENT, NODES),
    }
    for role in ("view", "edit"):
        users[role] = f"a-user-with-holdfast-{role}"
        installed.kubectl(
            *("create", "rolebinding", role, f"--namespace={namespace}"),
            *(f"--clusterrole=holdfast-{role}", f"--user={users[role]}"),
        )
    places = {"any": namespace, "own": SYSTEM, "cluster": ""}
    stated = tuple(documented_rights())
    reviews = [
        review_of(users[each.role], each.verb, each.group, each.resource, places[each.where], each.name)
        for each in stated
    ]
    answers = answers_to(installed, reviews)
    wrong = [each for each, allowed in zip(stated, answers, strict=True) if allowed != each.allowed]
    assert wrong == []
    assert sum(each.allowed for each in stated) > 40


def test_the_programs_have_no_other_rights(installed: ClusterUnderTest) -> None:
    assert allowed(installed, MAY_NOT) == []


_NOT_OURS = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "Supervision", "name": "gpt", "uid": "1"}


@pytest.mark.parametrize(
    ("labels", "owners"),
    [
        ({}, []),
        ({"holdfast.dev/standby-of": "gpt"}, []),
        ({"holdfast.dev/standby-of": "gpt"}, [_NOT_OURS]),  # it does not control the pod
        ({}, [{**_NOT_OURS, "controller": True}]),
        ({"holdfast.dev/standby-of": "gpt"}, [{**_NOT_OURS, "kind": "Job", "controller": True}]),
    ],
)
def test_the_supervisor_creates_only_standbys(
    installed: ClusterUnderTest, namespace: str, labels: Json, owners: list[Json]
) -> None:
    """Its role cannot say this, so an admission policy does."""
    container = {
        "name": "main",
        "image": "holdfast:dev",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "forged", "labels": labels, "ownerReferences": owners},
        "spec": {
            "containers": [container],
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        },
    }
    as_supervisor = ("-n", namespace, f"--as={service_account(SUPERVISOR)}", "--dry-run=server")
    done = installed.attempt("create", "-f", "-", *as_supervisor, text=json.dumps(pod))
    assert done.returncode != 0
    assert "may create and delete only standby pods" in done.stderr


@pytest.mark.parametrize(
    "write_late",
    [
        lambda made, old: made.describe(old.epoch, old.spec, RunSize(9, 9), {}),
        lambda made, old: made.request_stop(old.epoch, "now"),
        lambda made, old: made.request_stop(old.epoch, None),
        lambda made, old: made.write(old.epoch, {"phase": "ended"}),
    ],
    ids=["describe", "stop", "forget", "decide"],
)
async def test_a_supervisor_that_was_replaced_changes_nothing(
    installed: ClusterUnderTest,
    namespace: str,
    write_late: Callable[[SupervisionResource, Takeover], Awaitable[None]],
) -> None:
    """Its requests arrive after its successor's, with conditions that the API server itself tests."""
    assert installed
    async with await connect() as server:
        made = await ensure_resource(server, JobKey(namespace, "llama"), RunSize(2, 4), {"grace": "9s"})
        old = await made.take_over(1)
        await made.request_stop(old.epoch, "now")
        await made.request_stop(old.epoch, None)
        await made.request_stop(old.epoch, None)  # as after a lost answer
        new = await made.take_over(1)
        await made.request_stop(new.epoch, "graceful")
        await made.describe(new.epoch, new.spec, RunSize(3, 8), {})
        before = await server.get(SUPERVISIONS, made.name, namespace)
        with pytest.raises(Deposed):
            await write_late(made, old)
        found = await server.get(SUPERVISIONS, made.name, namespace)
    assert found == before
    assert found["spec"] == {
        "members": 3,
        "nprocPerNode": 8,
        "settings": {},
        "stop": "graceful",
        "owner": {"apiVersion": "", "kind": "", "name": "llama", "uid": ""},
    }
