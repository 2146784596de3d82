"""A merged adapter on the platform: two builds, and a delta that is the adapter's factors."""

from pathlib import Path

import pytest

from builds.compile_runner.deltas import delta_run_one
from builds.compile_runner.run import build_run_one
from builds.models import BuildJob, Model
from builds.services.deltas import delta_request
from builds.services.signing import keys_generate, repositories_init
from builds.states import VersionState
from builds.storage import blob_store
from tests.factories.builds import make_files, make_job, make_model, make_target, make_version
from tests.integration.test_merged_adapters import SHARED, submission

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def keys(state_dir: Path) -> None:
    keys_generate()
    repositories_init()


def built(model: Model, directory: Path) -> BuildJob:
    """Build a submission as the next version of a model."""
    version = make_version(model, state=VersionState.SUBMITTED)
    contents = {path.name.replace(".", "__"): path.read_bytes() for path in directory.iterdir()}
    version.files = make_files(**contents)
    version.save()
    job = make_job(version, make_target("x86-64-v1"))
    build_run_one(job.pk)
    job.refresh_from_db()
    return job


def test_the_delta_of_a_merged_adapter_is_its_factors(tmp_path: Path) -> None:
    model = make_model("adapted")
    first = built(model, submission(tmp_path / "first", None))
    second = built(model, submission(tmp_path / "second", 1))
    assert (first.state, second.state) == ("ready", "ready")
    assert "replays" not in first.report["artifacts"]
    assert second.report["adapters"][f"{SHARED}#0"]["merged"] == "replay"
    assert blob_store().has(second.report["artifacts"]["replays"])
    assert not second.bundle.sections.filter(
        sha256=second.report["artifacts"]["replays"]
    ).exists()  # devices do not see it
    delta = delta_request(first.bundle, second.bundle)
    delta_run_one(delta.pk)
    delta.refresh_from_db()
    assert delta.state == "ready"
    codecs = {row["component"]: row["codec"] for row in delta.report["sections"]}
    assert codecs[SHARED] == "planes+lowrank"
    assert delta.bsdiff4_bytes is not None
    assert 4 * delta.size_bytes < delta.bsdiff4_bytes


def test_a_base_of_another_shape_fails_the_build_with_its_numbers(tmp_path: Path) -> None:
    model = make_model("adapted")
    built(model, submission(tmp_path / "first", None, width=256))
    job = built(model, submission(tmp_path / "second", 1))
    assert (job.state, job.error_code) == ("failed_user", "build.user.merge_base")
    assert "512 x 512" in job.error_message
    assert "256 x 256" in job.error_message
