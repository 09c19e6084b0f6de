"""The right API server and credentials are found."""

from __future__ import annotations

import ssl
from datetime import datetime, timezone
from pathlib import Path

import pytest

from supervisor.kubernetes import access, certificates
from supervisor.kubernetes.access import ClusterNotConfigured, find_access

CONFIG = """
apiVersion: v1
kind: Config
clusters:
- name: c
  cluster: {server: "https://api.example:6443", certificate-authority: ca.crt, tls-server-name: kubernetes}
- {name: loose, cluster: {server: "https://api.example:6443", insecure-skip-tls-verify: true}}
- {name: plain, cluster: {server: "http://api.example:8001"}}
- {name: local, cluster: {server: "http://127.0.0.1:8001/"}}
users:
- {name: u, user: {token: secret}}
- {name: plugin, user: {exec: {apiVersion: client.authentication.k8s.io/v1, command: ./plugin}}}
contexts:
- {name: first, context: {cluster: c, user: u, namespace: research}}
- {name: second, context: {cluster: local, user: u}}
- {name: run, context: {cluster: local, user: plugin}}
- {name: loose, context: {cluster: loose, user: u}}
- {name: plain, context: {cluster: plain, user: u}}
- {name: no-cluster, context: {cluster: gone, user: u}}
current-context: first
"""
PLUGIN = """#!/bin/sh
printf '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", '
printf '"status": {"token": "%s"}}' "$(cat {token})"
"""


@pytest.fixture(autouse=True)
def nothing_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in (
        "KUBECONFIG",
        "KUBERNETES_SERVICE_HOST",
        "KUBERNETES_SERVICE_PORT",
        "HTTPS_PROXY",
        "https_proxy",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def authority() -> str:
    return certificates.bundle([certificates.new_authority(datetime.now(timezone.utc))])


@pytest.fixture
def config(tmp_path: Path, authority: str) -> Path:
    (tmp_path / "ca.crt").write_text(authority)
    path = tmp_path / "config"
    path.write_text(CONFIG)
    return path


async def test_the_current_context_of_a_kubeconfig_is_used(config: Path) -> None:
    found = await find_access(config)
    assert (found.url, found.namespace) == ("https://api.example:6443", "research")
    assert found.server_name == "kubernetes"
    assert await found.credentials.header() == "Bearer secret"
    assert found.tls is not None
    assert found.tls.verify_mode == ssl.CERT_REQUIRED
    assert found.tls.check_hostname


async def test_another_context_may_be_selected(config: Path) -> None:
    found = await find_access(config, "second")
    assert (found.url, found.namespace, found.tls) == ("http://127.0.0.1:8001", "default", None)


async def test_the_environment_and_the_home_directory_are_searched(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path.home() / ".kube" / "config"
    home.parent.mkdir(parents=True)
    home.write_text(CONFIG.replace("current-context: first", "current-context: second"))
    assert (await find_access()).url == "http://127.0.0.1:8001"
    monkeypatch.setenv("KUBECONFIG", f"{config.parent / 'missing'}:{config}")
    assert (await find_access()).url == "https://api.example:6443"


@pytest.mark.parametrize(
    ("context", "why"),
    [
        ("loose", "insecure-skip-tls-verify"),
        ("plain", "neither https"),
        ("no-cluster", "unusable.*gone"),
        ("nowhere", "unusable.*nowhere"),
    ],
)
async def test_an_unsafe_or_incomplete_context_is_refused(config: Path, context: str, why: str) -> None:
    with pytest.raises(ClusterNotConfigured, match=why):
        await find_access(config, context)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "a: [", "contexts: 5\ncurrent-context: x", "\x00"])
async def test_an_invalid_kubeconfig_is_reported(config: Path, text: str) -> None:
    config.write_text(text)
    with pytest.raises(ClusterNotConfigured, match="unusable"):
        await find_access(config)


@pytest.mark.parametrize("text", [None, "", "no certificate"])
async def test_a_broken_certificate_is_reported(config: Path, text: str | None) -> None:
    authority = config.parent / "ca.crt"
    authority.unlink() if text is None else authority.write_text(text)
    with pytest.raises(ClusterNotConfigured, match="unusable"):
        await find_access(config)


async def test_no_configuration_at_all_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ClusterNotConfigured, match=r"no cluster is configured: .*; set KUBECONFIG to"):
        await find_access()
    with pytest.raises(ClusterNotConfigured, match="does not exist"):
        await find_access(tmp_path / "missing")
    with pytest.raises(ClusterNotConfigured, match="context 'x' was requested"):
        await find_access(context="x")


async def test_a_credential_plugin_is_called_again_when_its_token_is_refused(
    config: Path, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("one")
    plugin = tmp_path / "plugin"
    plugin.write_text(PLUGIN.replace("{token}", str(tmp_path / "token")))
    plugin.chmod(0o755)
    config.write_text(CONFIG.replace("./plugin", str(plugin)))
    credentials = (await find_access(config, "run")).credentials
    assert await credentials.header() == "Bearer one"
    assert not await credentials.renew("Bearer one")
    (tmp_path / "token").write_text("two")
    assert await credentials.renew("Bearer one")
    assert await credentials.renew("Bearer one")  # a second request was refused at the same time
    assert await credentials.header() == "Bearer two"


# -- in a pod


@pytest.fixture
def account(tmp_path: Path, authority: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    directory = tmp_path / "serviceaccount"
    directory.mkdir()
    (directory / "token").write_text("one\n")
    (directory / "namespace").write_text("holdfast-system")
    (directory / "ca.crt").write_text(authority)
    monkeypatch.setattr(access, "_IN_POD", directory)
    return directory


async def test_a_pod_uses_its_service_account(account: Path) -> None:
    found = await find_access()
    assert (found.url, found.namespace) == ("https://[fd00::1]:443", "holdfast-system")
    assert (await found.credentials.header()).lower() == "bearer one"


async def test_a_rotated_token_is_read_again(account: Path) -> None:
    credentials = (await find_access()).credentials
    before = await credentials.header()
    assert not await credentials.renew(before)
    (account / "token").write_text("two")
    assert await credentials.renew(before)
    assert (await credentials.header()).lower() == "bearer two"


async def test_a_token_that_is_briefly_unreadable_is_not_a_failure(account: Path) -> None:
    credentials = (await find_access()).credentials
    before = await credentials.header()
    (account / "token").unlink()
    assert not await credentials.renew(before)
    assert await credentials.header() == before


@pytest.mark.parametrize("missing", ["token", "ca.crt"])
async def test_a_pod_without_a_service_account_is_reported(account: Path, missing: str) -> None:
    (account / missing).unlink()
    with pytest.raises(ClusterNotConfigured, match="service account"):
        await find_access()


async def test_a_kubeconfig_takes_precedence_over_the_service_account(account: Path, config: Path) -> None:
    assert (await find_access(config)).namespace == "research"


@pytest.mark.parametrize(
    ("context", "bypass", "expected"),
    [("first", "", "http://proxy:3128"), ("first", "api.example", ""), ("second", "", "")],
)
async def test_the_environments_proxy_is_used_for_other_hosts(
    config: Path, monkeypatch: pytest.MonkeyPatch, context: str, bypass: str, expected: str
) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://proxy:3128")
    monkeypatch.setenv("no_proxy", bypass)
    assert (await find_access(config, context)).proxy == expected
