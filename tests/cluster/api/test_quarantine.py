"""The quarantine on a real API server: what it writes to Nodes, and what it does not change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml

from supervisor.kubernetes.access import ServerAccess
from supervisor.kubernetes.client import ApiServer, ResourceKind
from supervisor.kubernetes.errors import Forbidden, InvalidObject, NotFound
from supervisor.nodes.names import CONDITION, MANAGER, RECORD, REQUEST, REQUESTED_BY, TAINT
from supervisor.quarantine.model import RunFault
from tests.cluster.api.kinds import NODES, PODS, SERVICE_ACCOUNTS, pod
from tests.cluster.api.node_pool import FOREIGN_TAINTS, LIMIT_S, XID, PlayedNodes
from tests.cluster.api.test_identity import account_of, token_for
from tests.unit.literals import ROOT

pytestmark = pytest.mark.cluster
WITHIN_S = 2.0  # from a confirmed report to the taint
# The annotations with which an operator requests, under other names: if Holdfast is installed here, its
# supervisor carries out requests on any Node and removes them.
ASIDE = "api-test.holdfast.dev/" + REQUEST.partition("/")[2]
ASIDE_BY = "api-test.holdfast.dev/" + REQUESTED_BY.partition("/")[2]
ADMISSION = "admissionregistration.k8s.io"
POLICIES = ResourceKind(ADMISSION, "v1", "validatingadmissionpolicies", namespaced=False)
BINDINGS = ResourceKind(ADMISSION, "v1", "validatingadmissionpolicybindings", namespaced=False)
BUDGETS = ResourceKind("policy", "v1", "poddisruptionbudgets")
ROLES = ResourceKind("rbac.authorization.k8s.io", "v1", "clusterroles", namespaced=False)
ROLE_BINDINGS = ResourceKind("rbac.authorization.k8s.io", "v1", "clusterrolebindings", namespaced=False)


@pytest.fixture
async def played(api: ApiServer, namespace: str) -> AsyncIterator[PlayedNodes]:
    made = PlayedNodes(api, namespace)
    try:
        yield made
    finally:
        await made.remove()


async def heard(played: PlayedNodes, *names: str) -> None:
    """Have each agent report again, because a new leader does not trust the reports that it finds."""
    for name in names or played.names:
        await played.report(name)


async def test_a_confirmed_fault_is_a_taint_with_evidence_and_its_removal_by_hand_is_respected(
    api: ApiServer, played: PlayedNodes
) -> None:
    bad, *others = await played.add(4)
    await played.configure()
    async with played.supervised():
        await heard(played)
        await played.until(lambda: len(played.names) == 4)
        await played.report(bad, XID)
        took_s = await played.until(lambda: played.is_tainted(bad) and played.condition(bad))
        assert took_s <= WITHIN_S
        assert played.taints(bad) == [
            *FOREIGN_TAINTS,
            {"key": TAINT, "value": "reboot_node", "effect": "NoSchedule"},
        ]
        record = played.record(bad)
        assert record["quarantine"]["evidence"] == ["GPU-1 xid 79 reboot_node"]
        assert (record["by"], "xid 79" in record["why"], len(record["at"])) == ("holdfast", True, 20)
        condition = played.condition(bad)
        assert (condition["status"], condition["reason"]) == ("True", "RebootNode")
        assert "xid 79" in await played.event(bad, "Quarantined")
        assert not any(map(played.is_tainted, others))

        # kubectl taint nodes NODE holdfast.dev/unhealthy-
        await api.patch(NODES, bad, {"spec": {"taints": FOREIGN_TAINTS}})
        await played.until(lambda: played.record(bad).get("waiver"))
        assert await played.event(bad, "ReleasedByOperator")
        await played.report(bad, XID, held_s=200.0)
        await played.until(lambda: played.condition(bad).get("reason") == "ReleasedByOperator")
        assert played.taints(bad) == FOREIGN_TAINTS
    # The next leader knows it too.
    async with played.supervised() as quarantine:
        await heard(played, *others)
        await played.report(bad, XID, held_s=300.0)
        await played.report(others[0], XID)
        await played.until(lambda: played.is_tainted(others[0]))
        assert played.taints(bad) == FOREIGN_TAINTS
        assert played.node(bad)["metadata"]["annotations"]["example.com/kept"] == "yes"
        assert quarantine.settings.dry_run == "false"


async def test_a_dry_run_announces_and_touches_nothing(api: ApiServer, played: PlayedNodes) -> None:
    (bad, _) = await played.add(2)
    await played.configure(dry_run="first-hour")
    await played.install()
    async with played.supervised() as quarantine:
        await heard(played)
        quarantine.note_run_fault(bad, RunFault(1.0))
        await played.report(bad, XID)
        said = await played.event(bad, "QuarantineDryRun")
        assert said.startswith("dry run: Holdfast would taint this node: GPU-1 xid 79")
        assert played.taints(bad) == FOREIGN_TAINTS
        assert MANAGER not in played.managers(bad)
        assert RECORD not in played.node(bad)["metadata"]["annotations"]
        # Without the dry run, the same process acts on what it has seen.
        await played.configure()
        await played.until(lambda: played.is_tainted(bad))


async def test_the_breaker_holds_with_most_nodes_bad_and_says_so(played: PlayedNodes) -> None:
    names = await played.add(4)
    await played.configure()
    async with played.supervised():
        await heard(played)
        for name in names[:3]:
            await played.report(name, XID)
        await played.until(lambda: any(map(played.is_tainted, names)))
        held = [name for name in names[:3] if not played.is_tainted(name)]
        said = [await played.event(name, "QuarantineAlert") for name in held]
        assert len(held) == 2
        assert [each for each in said if "1 of 4 nodes are out; at most 1 may be" not in each] == []
        assert sum(map(played.is_tainted, names)) == 1


async def test_two_leaders_taint_a_node_once_and_only_under_their_term(played: PlayedNodes) -> None:
    bad, _, late = await played.add(3)
    await played.configure(max_share="1")
    left = {"one": 60.0}
    async with played.supervised(leads=lambda: left["one"]), played.supervised():
        await heard(played)
        await played.report(bad, XID)
        await played.until(lambda: played.is_tainted(bad) and played.condition(bad))
        assert len(played.record(bad)["history"]) == 1
    left["one"] = 0.0
    async with played.supervised(leads=lambda: left["one"]):
        await heard(played)
        await played.report(late, XID)
        await asyncio.sleep(1.0)  # nothing happens, so there is nothing to wait for
        assert not played.is_tainted(late)
        left["one"] = 60.0
        await played.until(lambda: played.is_tainted(late))


async def test_requests_of_operators_are_carried_out_and_removed_even_in_a_dry_run(
    api: ApiServer, played: PlayedNodes
) -> None:
    name, other = await played.add(2)
    await played.configure(dry_run="true")

    async def ask(text: str) -> None:
        asked = await api.patch(NODES, name, {"metadata": {"annotations": {REQUEST: text}}})
        since = int(asked["metadata"]["resourceVersion"])
        await played.until(lambda: int(played.node(name)["metadata"]["resourceVersion"]) >= since)
        await played.until(lambda: REQUEST not in played.node(name)["metadata"]["annotations"])

    async with played.supervised():
        await heard(played)
        await ask("quarantine: burnt smell")
        taint = {"key": TAINT, "value": "operator", "effect": "NoSchedule"}
        assert played.taints(name) == [*FOREIGN_TAINTS, taint]
        assert played.record(name)["why"] == "an operator has taken it out: burnt smell"
        await played.until(lambda: played.condition(name).get("reason") == "Operator")
        await ask("release")
        assert played.taints(name) == FOREIGN_TAINTS
        await ask("quarantene: x")
        assert "expected 'release'" in await played.event(name, "RequestRefused")
        assert played.taints(name) == FOREIGN_TAINTS
        assert not played.is_tainted(other)


async def test_bad_settings_leave_the_last_good_ones_in_force(api: ApiServer, played: PlayedNodes) -> None:
    bad, _ = await played.add(2)
    await played.configure()
    async with played.supervised() as quarantine:
        await heard(played)
        await played.report(bad, XID, held_s=0.0)
        await played.until(lambda: played.names)
        good = quarantine.settings
        await played.configure(confrim="5s")
        await played.report(bad, XID)
        await played.until(lambda: played.is_tainted(bad))
        assert quarantine.settings is good


def policy_and_binding(file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the objects in a manifest file, with the other names of an operator's annotations."""
    assert REQUESTED_BY.startswith(REQUEST)
    policy, binding = yaml.safe_load_all((ROOT / "manifests/base" / file).read_text().replace(REQUEST, ASIDE))
    return policy, binding


@pytest.fixture
async def limited(api: ApiServer, namespace: str) -> AsyncIterator[ApiServer]:
    """Yield a client with the supervisor's rights on Nodes, limited by the policy of the manifests."""
    access = list(yaml.safe_load_all((ROOT / "manifests/base/access.yaml").read_text()))
    role = next(each for each in access if each["kind"] == "ClusterRole")
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "supervisor"}}
    await api.create(SERVICE_ACCOUNTS, account, namespace)
    user = f"system:serviceaccount:{namespace}:supervisor"
    policy, binding = policy_and_binding("node-changes.yaml")
    for each in (policy, binding, role):
        each["metadata"]["name"] = namespace
    policy["spec"]["matchConditions"][0]["expression"] = f"request.userInfo.username == {user!r}"
    binding["spec"]["policyName"] = namespace
    subject = {"kind": "ServiceAccount", "name": "supervisor", "namespace": namespace}
    bound = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": namespace},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": namespace},
        "subjects": [subject],
    }
    made: tuple[tuple[ResourceKind, dict[str, Any]], ...] = (
        (POLICIES, policy),
        (BINDINGS, binding),
        (ROLES, role),
        (ROLE_BINDINGS, bound),
    )
    for kind, body in made:
        await api.create(kind, body)
    audience = "https://kubernetes.default.svc.cluster.local"
    try:
        token = await token_for(api, namespace, audience, account="supervisor")
    except InvalidObject:
        token = await token_for(api, namespace, "https://kubernetes.default.svc", account="supervisor")
    url, tls = api._access.url, _anonymous(api)
    try:
        async with ApiServer(ServerAccess(url, _Token(token), tls)) as client:
            yield client
    finally:
        for kind, body in made:
            await api.delete(kind, body["metadata"]["name"])


class _Token:
    """Credentials that consist of one token."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def header(self) -> str:
        return f"Bearer {self._token}"

    async def renew(self, refused: str) -> bool:
        return False


def _anonymous(api: ApiServer) -> Any:
    """Return TLS settings that verify the server as `api` does, but present no client certificate."""
    import ssl

    assert api._access.tls is not None
    made = ssl.create_default_context()
    for der in api._access.tls.get_ca_certs(binary_form=True):
        made.load_verify_locations(cadata=ssl.DER_cert_to_PEM_cert(der))
    made.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return made


async def test_the_supervisor_can_change_nothing_else_of_a_node(
    limited: ApiServer, played: PlayedNodes
) -> None:
    (name,) = await played.add(1)
    ours = {"key": TAINT, "value": "none", "effect": "NoSchedule"}
    refusals: list[str] = []

    async def change(body: dict[str, Any], subresource: str = "") -> bool:
        try:
            await limited.patch(NODES, name, body, subresource=subresource, manager=MANAGER)
        except (Forbidden, InvalidObject) as error:
            refusals.append(error.message)
            return False
        return True

    # A new policy takes effect after a moment. Each attempt changes the label, or the policy would allow it.
    loop = asyncio.get_running_loop()
    end_s = loop.time() + LIMIT_S
    while await change({"metadata": {"labels": {"a": f"{loop.time():.6f}"}}}):
        assert loop.time() < end_s, "the policy has no effect"
        await change({"metadata": {"labels": {"a": None}}})
    taints = (await limited.get(NODES, name))["spec"]["taints"]
    conditions = (await limited.get(NODES, name))["status"]["conditions"]
    held = {"type": CONDITION, "status": "True", "reason": "Test", "message": ""}
    allowed: list[tuple[dict[str, Any], str]] = [
        ({"spec": {"taints": [*taints, ours]}}, ""),
        ({"spec": {"taints": [{**ours, "value": "replace"}, *taints]}}, ""),
        ({"metadata": {"annotations": {RECORD: "{}", ASIDE: "release"}}}, ""),
        ({"metadata": {"annotations": {ASIDE: None}}}, ""),
        ({"status": {"conditions": [*conditions, held]}}, "status"),
        ({"spec": {"taints": taints}, "metadata": {"annotations": {RECORD: None}}}, ""),
    ]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"spec": {"taints": taints[1:]}}, ""),
        ({"spec": {"taints": [*taints, {"key": "other", "effect": "NoSchedule"}]}}, ""),
        ({"spec": {"taints": [*taints, {**ours, "effect": "NoExecute"}]}}, ""),
        ({"spec": {"unschedulable": True}}, ""),
        ({"spec": {"providerID": "x://y"}}, ""),
        ({"metadata": {"annotations": {"example.com/kept": None}}}, ""),
        ({"metadata": {"annotations": {"example.com/kept": "no"}}}, ""),
        ({"metadata": {"annotations": {"example.com/new": "1"}}}, ""),
        ({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}, ""),
        ({"metadata": {"finalizers": ["example.com/never"]}}, ""),
        ({"status": {"conditions": [held]}}, "status"),
        ({"status": {"conditions": [{"type": "Ready", "status": "False"}, held]}}, "status"),
        ({"status": {"capacity": {"nvidia.com/gpu": "8"}}}, "status"),
        ({"status": {"nodeInfo": {"bootID": "b2"}}}, "status"),
        ({"status": {"phase": "Terminated"}}, "status"),
        ({"metadata": {"annotations": {"example.com/new": "1"}}}, "status"),
    ]
    assert [each for each in allowed if not await change(*each)] == []
    assert [each for each in refused if await change(*each)] == []
    assert all("Holdfast's" in each for each in refusals), "refused for another reason"
    with pytest.raises(Forbidden):
        await limited.delete(NODES, name)


async def test_nobody_can_request_in_another_name_or_change_anothers_request(
    api: ApiServer, limited: ApiServer, namespace: str, played: PlayedNodes
) -> None:
    (name,) = await played.add(1)
    policy, binding = policy_and_binding("node-requests.yaml")
    for each in (policy, binding):
        each["metadata"]["name"] = f"{namespace}-requests"
    binding["spec"]["policyName"] = f"{namespace}-requests"
    here = f'object.metadata.name == "{name}"'  # others test with this API server
    policy["spec"]["matchConditions"].insert(0, {"name": "here", "expression": here})
    await api.create(POLICIES, policy)
    await api.create(BINDINGS, binding)

    async def annotates(client: ApiServer, **notes: str | None) -> bool:
        keys = {"request": ASIDE, "by": ASIDE_BY}
        body = {"metadata": {"annotations": {keys[key]: text for key, text in notes.items()}}}
        try:
            await client.patch(NODES, name, body)
        except (Forbidden, InvalidObject) as error:
            refusals.append(error.message)
            return False
        return True

    refusals: list[str] = []
    loop = asyncio.get_running_loop()
    try:
        end_s = loop.time() + LIMIT_S
        while await annotates(limited, by=f"{loop.time():.6f}"):  # a new policy takes effect after a moment
            assert loop.time() < end_s, "the policy has no effect"
        await annotates(api, by=None)
        me = f"system:serviceaccount:{namespace}:supervisor"
        assert not await annotates(limited, request="release", by="eva")
        assert await annotates(limited, request="release", by=me)
        assert not await annotates(api, request="quarantine: not hers")
        assert not await annotates(api, request="quarantine: not hers", by=None)
        assert not await annotates(limited, by=None), "nor does a request lose its name"
        assert await annotates(limited, request=None, by=None)
        assert await annotates(limited, request="release"), "a request need not name anybody"
        assert all("must be the name of the requesting user" in each for each in refusals), refusals
    finally:
        await api.delete(POLICIES, f"{namespace}-requests")
        await api.delete(BINDINGS, f"{namespace}-requests")


async def test_a_node_that_is_deleted_takes_its_quarantine_with_it(
    api: ApiServer, played: PlayedNodes
) -> None:
    bad, other = await played.add(2)
    await played.configure()
    async with played.supervised():
        await heard(played)
        await played.report(bad, XID)
        await played.until(lambda: played.is_tainted(bad))
        await api.delete(NODES, bad)
        played.names.remove(bad)
        await played.report(other, XID)
        await played.until(lambda: played.is_tainted(other))
        with pytest.raises(NotFound):
            await api.get(NODES, bad)


class PlayedJobs:
    """Jobs whose members are on one node until they are asked to leave, and a moment longer."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.members: dict[str, int] = {}

    def leave(self, node: str, why: str) -> None:
        self.asked.append((node, why))

    def members_on(self, node: str) -> int:
        return self.members.get(node, 0)

    def heed_verdicts(self, nodes: frozenset[str]) -> None:
        """Do nothing, because these agents publish reports but no conditions."""


async def pod_on(api: ApiServer, namespace: str, name: str, node: str, **metadata: Any) -> None:
    body = pod(namespace, name, node)
    body["metadata"].update(metadata)
    await api.create(PODS, body, namespace)


async def pods_of(api: ApiServer, namespace: str) -> set[str]:
    return {each["metadata"]["name"] for each in (await api.list(PODS, namespace)).objects}


async def test_a_drain_moves_the_jobs_first_and_evicts_others_only_as_their_budgets_allow(
    api: ApiServer, namespace: str, played: PlayedNodes
) -> None:
    bad, _ = await played.add(2)
    await account_of(api, namespace)
    await pod_on(api, namespace, "member", bad, labels={"holdfast.dev/member": "true"})
    await pod_on(api, namespace, "web", bad, labels={"app": "web"})
    # A budget protects no pod that is pending, and here no kubelet says that the pod runs.
    running = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    await api.patch(PODS, "web", {"status": running}, namespace, subresource="status")
    await pod_on(api, namespace, "free", bad)
    budget = {
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "web"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}},
    }  # fmt: skip
    await api.create(BUDGETS, budget, namespace)
    await played.configure(drain_others="true")
    jobs = PlayedJobs()
    jobs.members[bad] = 1
    async with played.supervised(jobs):
        await heard(played)
        await played.report(bad, XID)
        await played.until(lambda: jobs.asked)
        assert played.is_tainted(bad), "the taint comes before the drain"
        assert jobs.asked[0][0] == bad
        assert "xid 79" in jobs.asked[0][1]
        assert await played.event(bad, "Draining")
        assert await pods_of(api, namespace) == {"member", "web", "free"}, "the members leave first"
    # The next leader continues. By then, the members have left.
    jobs.members[bad] = 0
    async with played.supervised(jobs):
        said = await played.event(bad, "DrainBlocked")
        assert said.startswith(f"pod {namespace}/web is not evicted yet: ")
        assert await pods_of(api, namespace) == {"member", "web"}
        await api.delete(BUDGETS, "web", namespace)
        assert await played.event(bad, "Drained")
        assert await pods_of(api, namespace) == {"member"}
        assert len(played.record(bad)["history"]) == 1


async def test_without_leave_to_drain_others_their_pods_stay(
    api: ApiServer, namespace: str, played: PlayedNodes
) -> None:
    bad, _ = await played.add(2)
    await account_of(api, namespace)
    await pod_on(api, namespace, "free", bad)
    await played.configure()
    jobs = PlayedJobs()
    jobs.members[bad] = 1
    async with played.supervised(jobs):
        await heard(played)
        await played.report(bad, XID)
        await played.until(lambda: jobs.asked)
        jobs.members[bad] = 0
        assert await played.event(bad, "Drained")
        assert await pods_of(api, namespace) == {"free"}


async def test_a_node_is_released_after_its_proof_of_health(played: PlayedNodes) -> None:
    bad, _ = await played.add(2)
    await played.configure()
    async with played.supervised():
        await heard(played)
        await played.report(bad, XID)
        await played.until(lambda: played.is_tainted(bad))
        await played.boot(bad, "b2")
        # Two seconds of health are enough in this policy, and both clocks must have seen them.
        await played.report(bad, boot_id="b2", clean_s=9e4)
        await played.until(lambda: not played.is_tainted(bad))
        await played.until(lambda: played.condition(bad).get("reason") == "Released")
        assert await played.event(bad, "Released")
        assert played.taints(bad) == FOREIGN_TAINTS
