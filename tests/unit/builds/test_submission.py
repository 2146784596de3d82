"""Blobs and versions over the management API: repeats, twins, bad input, roles."""

import hashlib
import json
from typing import Any

import pytest
from django.test import Client

from builds.common.auth import token_create
from builds.common.roles import Role
from builds.errors import CompileFailure
from builds.models import AuditEvent, Blob, BuildJob, ModelVersion, VersionCheck
from builds.services.deltas import delta_request
from builds.services.jobs import build_lease_next
from builds.services.version_checks import check_fail, check_lease_next
from builds.states import VersionState
from builds.storage import blob_store
from tests.conftest import FakeClock
from tests.factories.builds import (
    MINIMAL_ONNX,
    PIPELINE,
    make_bundle,
    make_model,
    make_target,
    make_version,
)

pytestmark = pytest.mark.django_db


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def stored(data: bytes) -> bytes:
    with blob_store().open(sha(data)) as file:
        return file.read()


def nested(depth: int) -> dict[str, object]:
    """Return an object with `depth` further objects in it."""
    value: dict[str, object] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


class Api:
    """A CI client with a token of one role."""

    def __init__(self, role: Role | None) -> None:
        self.client = Client()
        self.headers: dict[str, str] = {}
        if role is not None:
            _, text = token_create(name="t", role=role)
            self.headers = {"authorization": f"Bearer {text}"}

    def put(self, address: str, data: bytes, **headers: str) -> Any:
        return self.client.put(
            f"/api/v1/blobs/{address}",
            data,
            content_type="application/octet-stream",
            headers={**self.headers, **headers},
        )

    def post(self, path: str, body: object, **headers: str) -> Any:
        return self.client.post(
            f"/api/v1{path}",
            json.dumps(body),
            content_type="application/json",
            headers={**self.headers, **headers},
        )

    def get(self, path: str) -> Any:
        return self.client.get(f"/api/v1{path}", headers=self.headers)

    def upload(self, **files: bytes) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for name, data in files.items():
            assert self.put(sha(data), data).status_code in (200, 201)
            real = name.replace("__", ".")
            rows.append({"name": real, "sha256": sha(data), "size_bytes": len(data)})
        return rows


@pytest.fixture
def ci() -> Api:
    return Api(Role.DEVELOPER)


@pytest.fixture
def submission(ci: Api) -> dict[str, object]:
    make_model("doc-reader")
    files = ci.upload(pipeline__json=json.dumps(PIPELINE).encode(), model__onnx=MINIMAL_ONNX)
    return {"version": "1.0.0", "files": files, "claim": {"accuracy": 0.9}, "notes": "first"}


def test_it_stores_an_upload_once(ci: Api) -> None:
    data = b"x" * 3_000_000
    assert ci.put(sha(data), data).status_code == 201
    again = ci.put(sha(data), data)
    assert again.status_code == 200
    assert again.json()["size_bytes"] == len(data)
    assert stored(data) == data
    assert Blob.objects.count() == 1


def test_it_refuses_bytes_with_another_digest(ci: Api) -> None:
    answer = ci.put(sha(b"right"), b"wrong")
    assert answer.status_code == 422
    assert answer["Content-Type"] == "application/problem+json"
    assert answer.json()["code"] == "blob.digest_mismatch"
    assert not blob_store().has(sha(b"right"))
    assert Blob.objects.count() == 0


def test_it_refuses_wrong_bytes_for_a_blob_that_exists(ci: Api) -> None:
    ci.put(sha(b"right"), b"right")
    assert ci.put(sha(b"right"), b"wrong").status_code == 422
    assert stored(b"right") == b"right"


@pytest.mark.parametrize("address", ["abc", "A" * 64, "..%2f..%2fetc"])
def test_it_refuses_an_address_that_is_no_digest(ci: Api, address: str) -> None:
    assert ci.put(address, b"x").status_code in (400, 404)


def test_it_refuses_uploads_above_the_limit(ci: Api, settings: Any) -> None:
    limit = settings.SPARSEFLEET.max_upload_bytes
    settings.SPARSEFLEET.max_upload_bytes = 10
    try:
        answer = ci.put(sha(b"x" * 11), b"x" * 11)
    finally:
        settings.SPARSEFLEET.max_upload_bytes = limit
    assert answer.status_code == 413
    assert answer.json()["code"] == "blob.too_large"


def test_it_answers_head_and_get_for_a_blob(ci: Api) -> None:
    ci.put(sha(b"abc"), b"abc")
    head = ci.client.head(f"/api/v1/blobs/{sha(b'abc')}", headers=ci.headers)
    assert (head.status_code, head["Content-Length"], head.content) == (200, "3", b"")
    got = ci.get(f"/blobs/{sha(b'abc')}")
    assert b"".join(got.streaming_content) == b"abc"
    assert ci.get(f"/blobs/{sha(b'other')}").status_code == 404


def test_it_does_not_announce_a_blob_that_the_disk_lost(ci: Api) -> None:
    ci.put(sha(b"abc"), b"abc")
    address = f"/api/v1/blobs/{sha(b'abc')}"
    blob_store().path(sha(b"abc")).write_bytes(b"ab")
    assert ci.client.head(address, headers=ci.headers).status_code == 404
    assert ci.get(f"/blobs/{sha(b'abc')}").status_code == 404
    blob_store().path(sha(b"abc")).unlink()
    assert ci.client.head(address, headers=ci.headers).status_code == 404
    assert ci.put(sha(b"abc"), b"abc").status_code == 200
    assert ci.client.head(address, headers=ci.headers).status_code == 200


def test_it_takes_a_version_in_and_queues_a_build_per_active_target(
    ci: Api, submission: dict[str, object]
) -> None:
    make_target("x86-64-v3")
    make_target("x86-64-v1")
    answer = ci.post("/models/doc-reader/versions", submission)
    assert answer.status_code == 201
    body = answer.json()
    assert (body["state"], body["release_seq"], body["error"]) == ("submitted", 1, None)
    assert len(body["builds"]) == 2
    assert AuditEvent.objects.filter(action="version.submit").count() == 1


def test_it_keeps_that_a_version_is_compiled_in_constant_time(
    ci: Api, submission: dict[str, object]
) -> None:
    wanted = {**submission, "constant_time": True}
    assert ci.post("/models/doc-reader/versions", wanted).json()["constant_time"] is True
    assert ci.post("/models/doc-reader/versions", wanted).status_code == 200
    assert ModelVersion.objects.get().constant_time
    answer = ci.post("/models/doc-reader/versions", submission)
    assert (answer.status_code, answer.json()["code"]) == (409, "version.exists")
    answer = ci.post("/models/doc-reader/versions", {**wanted, "constant_time": "perhaps"})
    assert answer.status_code == 422
    plain = {**submission, "version": "1.0.1", "constant_time": False}
    assert ci.post("/models/doc-reader/versions", plain).json()["constant_time"] is False
    left_out = {**submission, "version": "1.0.1"}
    assert ci.post("/models/doc-reader/versions", left_out).status_code == 200


def test_it_looks_at_a_version_first_whoever_works_on_an_older_one(
    ci: Api, submission: dict[str, object], clock: FakeClock
) -> None:
    make_target()
    ci.post("/models/doc-reader/versions", submission)
    [older] = VersionCheck.objects.all()
    assert check_lease_next(owner="dead", check_id=older.pk, clock=clock) == older
    assert build_lease_next(owner="dead", clock=clock) is not None
    ci.post("/models/doc-reader/versions", {**submission, "version": "2.0.0"})
    assert build_lease_next(owner="w", clock=clock) is None
    check = check_lease_next(owner="w", clock=clock)
    assert check is not None
    assert check.version.version == "2.0.0"
    fault = CompileFailure("Foo", failure_code="build.user.unsupported_op", can_retry=False)
    check_fail(check=check, owner="w", failure=fault, clock=clock)
    check.version.refresh_from_db()
    assert check.version.state == VersionState.INVALID.value
    [job] = check.version.jobs.all()
    assert (job.state, job.error_code) == ("failed_user", "build.user.unsupported_op")


def test_it_queues_a_first_look_when_no_target_is_active(
    ci: Api, submission: dict[str, object]
) -> None:
    body = ci.post("/models/doc-reader/versions", submission).json()
    assert (body["state"], body["builds"]) == ("submitted", [])
    assert VersionCheck.objects.get().version.version == "1.0.0"


def test_it_returns_the_same_version_for_a_repeated_submission(
    ci: Api, submission: dict[str, object]
) -> None:
    make_target()
    first = ci.post("/models/doc-reader/versions", submission)
    reordered = {**submission, "files": list(reversed(submission["files"]))}  # type: ignore[arg-type]
    second = ci.post("/models/doc-reader/versions", reordered)
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json() == second.json()
    assert (ModelVersion.objects.count(), BuildJob.objects.count()) == (1, 1)


def test_it_refuses_other_content_for_a_version_that_exists(
    ci: Api, submission: dict[str, object]
) -> None:
    ci.post("/models/doc-reader/versions", submission)
    answer = ci.post("/models/doc-reader/versions", {**submission, "notes": "second"})
    assert (answer.status_code, answer.json()["code"]) == (409, "version.exists")


def test_it_answers_an_idempotency_key_from_memory(ci: Api, submission: dict[str, object]) -> None:
    first = ci.post("/models/doc-reader/versions", submission, **{"Idempotency-Key": "k1"})
    second = ci.post("/models/doc-reader/versions", submission, **{"Idempotency-Key": "k1"})
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert second["Idempotent-Replayed"] == "true"
    other = ci.post(
        "/models/doc-reader/versions",
        {**submission, "version": "2.0.0"},
        **{"Idempotency-Key": "k1"},
    )
    assert (other.status_code, other.json()["code"]) == (422, "app.idempotency_mismatch")
    assert ModelVersion.objects.count() == 1


def test_it_forgets_the_key_of_a_request_that_failed(
    ci: Api, submission: dict[str, object]
) -> None:
    bad = {**submission, "base_version": "0.1"}
    assert (
        ci.post("/models/doc-reader/versions", bad, **{"Idempotency-Key": "k2"}).status_code == 404
    )
    good = ci.post("/models/doc-reader/versions", submission, **{"Idempotency-Key": "k2"})
    assert good.status_code == 201


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"version": "../1"}, "app.invalid_input"),
        ({"files": []}, "app.invalid_input"),
        (
            {"files": [{"name": "pipeline.json", "sha256": "0" * 64, "size_bytes": 1}]},
            "version.blob_missing",
        ),
        (
            {"files": [{"name": "model.onnx", "sha256": "0" * 64, "size_bytes": 1}]},
            "version.pipeline_invalid",
        ),
        (
            {"files": [{"name": "../pipeline.json", "sha256": "0" * 64, "size_bytes": 1}]},
            "app.invalid_input",
        ),
        (
            {"files": [{"name": "pipeline.json", "sha256": "z" * 64, "size_bytes": 1}]},
            "app.invalid_input",
        ),
        ({"security_epoch": -1}, "app.invalid_input"),
        ({"claim": 3}, "app.invalid_input"),
        ({"claim": nested(8)}, "app.invalid_input"),
        ({"claim": nested(900)}, "app.invalid_input"),
        ({"claim": {"a": "x" * 65_536}}, "app.invalid_input"),
        ({"claim": {"a": ["\0"]}}, "app.invalid_input"),
        ({"claim": {"\ud800": 1}}, "app.invalid_input"),
        ({"notes": "x" * 65_537}, "app.invalid_input"),
        ({"notes": "\0"}, "app.invalid_input"),
        ({"notes": "\ud800"}, "app.invalid_input"),
        (
            {"files": [{"name": f"f{i}", "sha256": "0" * 64, "size_bytes": 1} for i in range(999)]},
            "app.invalid_input",
        ),
    ],
)
def test_it_refuses_a_bad_submission(
    ci: Api, submission: dict[str, object], change: dict[str, object], code: str
) -> None:
    answer = ci.post("/models/doc-reader/versions", {**submission, **change})
    assert (answer.status_code, answer.json()["code"]) == (422, code)
    assert ModelVersion.objects.count() == 0


def test_it_takes_a_claim_that_is_just_small_enough(ci: Api, submission: dict[str, object]) -> None:
    claim = nested(7) | {"text": "x" * 65_400}
    answer = ci.post("/models/doc-reader/versions", {**submission, "claim": claim})
    assert (answer.status_code, answer.json()["claim"]) == (201, claim)


@pytest.mark.parametrize("data", [b"weights", b"{}", MINIMAL_ONNX[:-1], MINIMAL_ONNX[:4]])
def test_it_refuses_a_file_that_is_no_model(
    ci: Api, submission: dict[str, object], data: bytes
) -> None:
    files = ci.upload(pipeline__json=json.dumps(PIPELINE).encode(), model__onnx=data)
    answer = ci.post("/models/doc-reader/versions", {**submission, "files": files})
    assert (answer.status_code, answer.json()["code"]) == (422, "build.user.malformed_model")
    assert "model.onnx" in answer.json()["detail"]
    assert answer.json()["hint"]
    assert ModelVersion.objects.count() == 0


@pytest.mark.parametrize(
    ("image", "sets", "status"),
    [
        (True, (), 422),
        (True, ("calibration.json",), 422),
        (True, ("calibration.json", "calibration.npz"), 201),
        (True, ("calibration.json", "calibration.npz", "evaluation.json"), 422),
        (False, (), 201),
        (False, ("evaluation.npz",), 422),
    ],
)
def test_it_wants_whole_sets_and_calibration_for_a_model_with_pictures(
    ci: Api, submission: dict[str, object], image: bool, sets: tuple[str, ...], status: int
) -> None:
    pipeline = PIPELINE | ({"image": {"height": 1}} if image else {})
    contents = {"pipeline__json": json.dumps(pipeline).encode(), "model__onnx": MINIMAL_ONNX}
    files = ci.upload(**contents, **{name.replace(".", "__"): b"x" for name in sets})
    answer = ci.post("/models/doc-reader/versions", {**submission, "files": files})
    assert answer.status_code == status
    if status == 422:
        assert answer.json()["code"] == "version.pipeline_invalid"
        assert "set is incomplete" in answer.json()["detail"]


@pytest.mark.parametrize(
    "pipeline",
    [
        b"not json",
        b"[]",
        b'{"schema": "other"}',
        b'{"schema": "sparsefleet.pipeline/1", "family": "unheard-of"}',
        b'{"schema": "sparsefleet.pipeline/1", "family": "graph", "components": {}}',
        json.dumps({**PIPELINE, "components": {"model": {"file": "absent.onnx"}}}).encode(),
    ],
)
def test_it_refuses_a_bad_pipeline_description(
    ci: Api, submission: dict[str, object], pipeline: bytes
) -> None:
    files = ci.upload(pipeline__json=pipeline, model__onnx=MINIMAL_ONNX)
    answer = ci.post("/models/doc-reader/versions", {**submission, "files": files})
    assert (answer.status_code, answer.json()["code"]) == (422, "version.pipeline_invalid")


def test_it_refuses_a_size_that_differs_from_the_upload(
    ci: Api, submission: dict[str, object]
) -> None:
    files = [dict(item, size_bytes=1) for item in submission["files"]]  # type: ignore[attr-defined]
    answer = ci.post("/models/doc-reader/versions", {**submission, "files": files})
    assert (answer.status_code, answer.json()["code"]) == (422, "version.blob_missing")


@pytest.mark.parametrize(
    ("role", "status"), [(None, 401), (Role.VIEWER, 403), (Role.APPROVER, 403)]
)
def test_it_lets_only_developers_submit(role: Role | None, status: int) -> None:
    api = Api(role)
    assert api.put(sha(b"x"), b"x").status_code == status
    answer = api.post("/models", {"name": "m"})
    assert answer.status_code == status
    assert answer["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize(
    "text", ["", "sf_1", "sf_1_", "sf_x_y", "xx_1_y", f"sf_{'9' * 30}_y", "sf_999_y"]
)
def test_it_refuses_malformed_tokens(text: str) -> None:
    answer = Client().get("/api/v1/models", headers={"authorization": f"Bearer {text}"})
    assert (answer.status_code, answer.json()["code"]) == (401, "app.unauthenticated")


def test_it_pages_through_versions_newest_first(ci: Api) -> None:
    model = make_model("paged")
    for _ in range(5):
        make_version(model)
    first = ci.get("/models/paged/versions?limit=2").json()
    second = ci.get(f"/models/paged/versions?limit=2&cursor={first['next']}").json()
    third = ci.get(f"/models/paged/versions?limit=2&cursor={second['next']}").json()
    seen = [row["release_seq"] for page in (first, second, third) for row in page["items"]]
    assert seen == [5, 4, 3, 2, 1]
    assert third["next"] is None
    assert ci.get("/models/paged/versions?cursor=x").status_code == 422
    assert ci.get("/models/paged/versions?limit=0").status_code == 422


@pytest.mark.parametrize(("path", "queries"), [("/builds", 2), ("/deltas", 2), ("/models", 2)])
def test_it_lists_with_a_fixed_number_of_queries(
    ci: Api, path: str, queries: int, django_assert_num_queries: Any
) -> None:
    model = make_model()
    ci.get(path)  # the token's last use is noted once a minute
    for _ in range(3):
        base, new = make_bundle(make_version(model)), make_bundle(make_version(model))
        delta_request(base, new)
    with django_assert_num_queries(queries):
        assert len(ci.get(path).json()["items"]) >= 1


def test_it_shows_a_build_a_bundle_and_their_history(ci: Api) -> None:
    bundle = make_bundle()
    body = ci.get(f"/bundles/{bundle.manifest_sha256}").json()
    assert [row["component"] for row in body["sections"]] == [
        "expert.L0.E0",
        "plan",
        "weights.shared",
    ]
    assert ci.get(f"/bundles/{bundle.manifest_sha256}/manifest").content == bundle.manifest_bytes
    build = ci.get(f"/builds/{bundle.job_id}").json()
    assert (build["state"], build["manifest_sha256"]) == ("ready", bundle.manifest_sha256)
    assert ci.get(f"/builds?state=ready&model={bundle.version.model.name}").json()["items"]
    assert ci.get("/builds?state=queued").json()["items"] == []
    assert ci.get("/builds?state=").json()["items"]
    refused = ci.get("/builds?state=done")
    assert (refused.status_code, refused.json()["code"]) == (422, "app.invalid_input")
    assert "'ready'" in refused.json()["detail"]
    assert ci.get(f"/bundles/{'0' * 64}").status_code == 404
    assert ci.get("/builds/999999").status_code == 404
    assert ci.post(f"/builds/{bundle.job_id}/retry", {}).status_code == 409
    names = {row["name"]: row["active"] for row in ci.get("/targets").json()}
    assert names["x86-64-v3"] is True
    assert ci.post("/targets/x86-64-v2/activate", {}).status_code == 403


def test_it_shows_why_a_version_is_invalid(ci: Api) -> None:
    version = make_version(make_model("broken"), state=VersionState.INVALID)
    ModelVersion.objects.filter(pk=version.pk).update(
        error_code="build.user.unsupported_op", error_message="node a: Foo", error_hint="use Bar"
    )
    body = ci.get(f"/models/broken/versions/{version.version}").json()
    assert body["error"] == {
        "code": "build.user.unsupported_op",
        "message": "node a: Foo",
        "hint": "use Bar",
    }


def test_it_makes_a_model_once(ci: Api) -> None:
    assert ci.post("/models", {"name": "m", "title": "M"}).status_code == 201
    assert ci.post("/models", {"name": "m", "title": "M"}).status_code == 200
    assert ci.post("/models", {"name": "m", "title": "Other"}).status_code == 409
    assert ci.post("/models", {"name": "Bad Name"}).status_code == 422
