from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

import pytest

from holdfast.protocol import environment
from supervisor.admission import settings
from supervisor.admission.pod_layout import PREFIX
from supervisor.admission.settings import ANNOTATIONS, DurableStorage, PodSettings, PodSettingsError
from supervisor.cli.command_options import RunOptions
from supervisor.cli.run import policy_of_run
from supervisor.controller import policy_options
from supervisor.options.run_options import RUN

# A value for each policy, other than its default.
VALUES = {
    "nproc-per-node": "3", "members": "4", "standby": "1", "min-members": "2",
    "warm": "cold", "snapshot-every": "7",
    "snapshot-budget": "2%", "checkpoint-every": "5m", "keep-checkpoints": "9", "max-restarts": "8",
    "skip-bad-batches": "true", "loss-jump": "12", "hang-factor": "5", "hang-floor": "10m",
    "stall-limit": "90s", "first-step-timeout": "20m", "pause-timeout": "2h", "member-timeout": "11",
    "grace": "25s",
}  # fmt: skip


def parse(**annotations: str) -> PodSettings:
    return settings.parse({PREFIX + key.replace("_", "-"): value for key, value in annotations.items()})


def problems(annotations: dict[str, str]) -> tuple[str, ...]:
    with pytest.raises(PodSettingsError) as raised:
        settings.parse({PREFIX + key: value for key, value in annotations.items()})
    return raised.value.problems


def test_each_option_of_run_is_either_an_annotation_or_local() -> None:
    options = {option.field for option in RUN}
    annotated = {option.field for option in ANNOTATIONS.values()} & options
    assert annotated | settings.LOCAL_ONLY == options
    assert annotated & settings.LOCAL_ONLY == set()
    assert {PREFIX + name for name in VALUES} == {settings.key_of(o) for o in RUN if o.field in annotated}


def test_each_annotation_is_a_field_of_the_settings() -> None:
    assert {option.field for option in ANNOTATIONS.values()} == {each.name for each in fields(PodSettings)}


def test_a_policy_has_the_same_default_as_in_a_local_run() -> None:
    local = RunOptions(command=("python", "x.py"))
    given = PodSettings()
    shared = {each.name for each in fields(PodSettings)} & {each.name for each in fields(RunOptions)}
    assert len(shared) == len(VALUES)
    differing = {name for name in shared if getattr(given, name) != getattr(local, name)}
    assert differing == {"members", "nproc_per_node"}  # the owner and the command of a pod determine these


@pytest.mark.parametrize("given", [{}, VALUES, {**VALUES, "loss-jump": "0"}])
def test_a_policy_equals_the_one_that_run_builds_from_the_same_options(given: dict[str, str]) -> None:
    by_name = {option.names[0].removeprefix("--"): option for option in RUN}
    values: dict[str, Any] = {
        by_name[name].field: True if (kind := by_name[name].value) is None else kind.read(text)
        for name, text in given.items()
    }
    local = policy_of_run(RunOptions(command=("x",), **values))
    parsed = parse(**given)
    assert settings.policy(parsed, members=parsed.members or 1) == local


def test_the_policy_uses_the_final_number_of_ranks() -> None:
    assert settings.policy(PodSettings(nproc_per_node="gpu"), 2, 8).nproc == 8
    assert settings.policy(PodSettings(nproc_per_node="gpu"), 2).nproc == 1
    assert settings.policy(PodSettings(), 2).members == 2


def test_a_sidecar_gets_its_share_of_the_settings() -> None:
    given = policy_options.sidecar_environment(parse(hang_factor="4", first_step_timeout="20m"))
    assert given == {
        environment.HANG_FACTOR: "4.0",
        environment.HANG_FLOOR_S: "0.6",
        environment.FIRST_STEP_S: "1200.0",
        environment.PAUSE_S: "1800.0",
    }
    assert policy_options.sidecar_environment(parse(hang_floor="5s"))[environment.HANG_FLOOR_S] == "5.0"


def test_annotations_of_others_and_internal_ones_are_ignored() -> None:
    others = {"holdfast.dev": "x", "example.com/hang-floor": "nonsense"}
    own = {PREFIX + "inject": "true", PREFIX + "injected": "{}", PREFIX + "not-injected": "why"}
    assert settings.parse({**others, **own}) == PodSettings()


def test_all_problems_are_reported_at_once_with_key_value_and_what_is_expected() -> None:
    assert problems({"hang-floor": "10x", "members": "0", "warm": "parc", "hang-flor": "1s"}) == (
        "holdfast.dev/hang-floor: invalid value '10x': expected a time of 50ms-1d, such as 30s or 5m",
        "holdfast.dev/hang-flor: unknown annotation: did you mean 'holdfast.dev/hang-floor'?",
        "holdfast.dev/members: invalid value '0': expected 1-4096",
        "holdfast.dev/warm: invalid value 'parc': did you mean 'park'? expected auto, park, spawn or cold",
    )


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("hang_floor", "hang-floor"),
        ("nnodes", "members"),
        ("keep", "keep-checkpoints"),
        ("Inject", "inject"),
        ("checkpoint", "checkpoints"),
    ],
)
def test_an_unknown_annotation_is_reported_with_the_nearest_known_name(key: str, meant: str) -> None:
    assert problems({key: "1"})[0].endswith(f"did you mean 'holdfast.dev/{meant}'?")


def test_an_unknown_annotation_without_a_similar_name_lists_all_known_ones() -> None:
    (problem,) = problems({"run-dir": "/x"})
    assert "known are holdfast.dev/container, " in problem
    assert "run-dir" not in problem.partition("known are")[2]


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False)])
def test_a_flag_is_true_or_false(text: str, value: bool) -> None:
    assert parse(skip_bad_batches=text).skip_bad_batches is value
    assert problems({"skip-bad-batches": "yes"}) == (
        "holdfast.dev/skip-bad-batches: invalid value 'yes': expected true or false",
    )


def test_a_value_that_is_not_text_is_reported_and_raises_no_error() -> None:
    with pytest.raises(PodSettingsError, match="expected a string: put it in quotes"):
        settings.parse({PREFIX + "members": 2})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("text", "storage"),
    [
        ("pvc://data", DurableStorage("data")),
        ("pvc://data/", DurableStorage("data")),
        ("pvc://data/runs/a", DurableStorage("data", "runs/a")),
        ("hostpath:///mnt/disk/", DurableStorage("", "/mnt/disk")),
        ("s3://my.bucket/runs/a/", DurableStorage(objects="s3://my.bucket/runs/a")),
        ("gs://bucket_1/a", DurableStorage(objects="gs://bucket_1/a")),
        ("az://container/a=1/b", DurableStorage(objects="az://container/a=1/b")),
    ],
)
def test_checkpoints_are_in_a_claim_a_directory_of_the_node_or_a_bucket(
    text: str, storage: DurableStorage
) -> None:
    assert parse(checkpoints=text).checkpoints == storage
    assert storage.is_durable


@pytest.mark.parametrize(
    "text",
    ["data", "pvc://", "pvc:///a", "pvc://UPPER", "pvc://data/../x", "hostpath://x/y", "hostpath:///",
     "hostpath:///a/../b", "S3://bucket/a", "s3:/bucket/a", "s4://bucket/a", ""],
)  # fmt: skip
def test_other_places_for_checkpoints_are_refused(text: str) -> None:
    (problem,) = problems({"checkpoints": text})
    assert problem.startswith(f"holdfast.dev/checkpoints: invalid value {text!r}: ")
    assert problem.endswith(
        "expected pvc://CLAIM, pvc://CLAIM/PATH, hostpath:///PATH, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or"
        " az://CONTAINER/PREFIX"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket", "s3://bucket/PREFIX: each job needs its own prefix"),
        ("s3://Bucket/a", "s3:// followed by a bucket of 3-63 lower-case letters, digits, dots and dashes"),
        ("az://a--b/c", "az:// followed by a container of 3-63 lower-case letters, digits and single dashes"),
        ("gs:///a", "gs:// followed by a bucket of 3-222 lower-case letters, digits, dots, dashes and"
         " underscores"),
        ("s3://bucket/a//b", "a prefix of at most 512 letters, digits and . _ = @ + -, in parts that are"
         " separated by single slashes and do not begin with a dot"),
    ],
)  # fmt: skip
def test_a_place_in_object_storage_that_is_not_valid_is_explained(text: str, expected: str) -> None:
    (problem,) = problems({"checkpoints": text})
    assert problem == f"holdfast.dev/checkpoints: invalid value {text!r}: expected {expected}"


def test_a_secret_is_only_for_object_storage() -> None:
    found = parse(checkpoints="s3://bucket/a", checkpoints_secret="gpt-s3")
    assert found.checkpoints_secret == "gpt-s3"
    (problem,) = problems({"checkpoints": "pvc://data", "checkpoints-secret": "gpt-s3"})
    assert problem == (
        "holdfast.dev/checkpoints-secret: 'gpt-s3' is only for object storage: expected"
        " holdfast.dev/checkpoints to be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
    )
    (problem,) = problems({"checkpoints": "s3://bucket/a", "checkpoints-secret": "no/name"})
    assert "expected a name of lower-case letters, digits and dashes" in problem


def test_the_size_of_the_state_is_a_quantity_within_bounds() -> None:
    assert parse(state_size="4Gi").state_bytes == 4 << 30
    assert parse(state_size="1500M").state_bytes == 1_500_000_000
    for text in ("4GB", "0", "-1Gi", "2Ei", ""):
        assert problems({"state-size": text})[0].endswith("expected a size of 1Ki-1Pi, such as 4Gi")


@pytest.mark.parametrize("key", ["container", "group"])
def test_names_are_validated_as_kubernetes_does(key: str) -> None:
    assert getattr(parse(**{key: "llama-7b"}), key) == "llama-7b"
    for text in ("", "Llama", "-a", "a" * 300, "a b"):
        assert len(problems({key: text})) == 1


def test_a_hang_floor_above_the_first_steps_limit_is_refused_as_by_run() -> None:
    (problem,) = problems({"hang-floor": "20m"})
    assert problem.endswith("invalid value '20m': expected at most holdfast.dev/first-step-timeout (10m)")
    assert parse(hang_floor="20m", first_step_timeout="30m").hang_floor_s == 1200


@pytest.mark.parametrize("like", ["x", "snapshot-every-", "y" * 300])
def test_few_of_many_unknown_annotations_are_compared_with_the_known_ones(
    like: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor reads the annotations of all pods repeatedly."""
    compared: list[str] = []

    def compare(text: str, *_: object, **__: object) -> list[str]:
        compared.append(text)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", compare)
    settings._nearest.cache_clear()
    found = [problems({f"{like}{n:05}": "" for n in range(5000)}) for _ in range(2)]
    settings._nearest.cache_clear()
    assert found[0] == found[1]
    assert len(found[0]) == settings.MAX_PROBLEMS + 1
    assert found[0][-1] == "further annotations were not checked"
    assert len(compared) == (settings.MAX_PROBLEMS if len(like) < 300 else 0)
    assert all(len(text) <= 150 for text in compared)


@pytest.mark.parametrize(
    "key", ["group", "warm", "members", "state-size", "checkpoints", "hang-floor", "grace"]
)
def test_a_huge_value_is_refused_without_being_parsed_and_not_quoted_in_full(key: str) -> None:
    (why,) = problems({key: "9" * 250_000})
    assert "it has more than 4096 characters" in why
    assert len(why) < 300
