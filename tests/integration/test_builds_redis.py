"""Two real workers on a real Redis share the builds; one of them compiles a real model."""

import json
from pathlib import Path

import pytest

from tests.integration.engines import redis_server
from tests.integration.platform import FAKE_CHILD, ROOT, STATES, Platform, submit, wait_until

ONNX = ROOT / "examples" / "moe-exports" / "exp_qwen3_moe_batched_mm_dynamo.onnx"
PIPELINE = {
    "schema": "sparsefleet.pipeline/1",
    "family": "graph",
    "max_step_tokens": 64,
    "components": {
        "model": {
            "file": "model.onnx",
            "inputs": {"x": {"role": "tensor"}},
            "outputs": {"view_5": {"role": "tensor"}},
        }
    },
}
QUICK = 6
WORKERS = """
from builds.models import BuildTransition
rows = BuildTransition.objects.filter(event="lease").values_list("subject_id", "actor")
print(json.dumps([[pk, actor.split(":")[1]] for pk, actor in rows]))
"""
REAL = """
from builds.models import Bundle
bundle = Bundle.objects.get(job_id={job})
vectors = bundle.job.report["selftest_vectors"]
print(json.dumps([bundle.verified_on, bundle.sections.count(), vectors]))
"""


@pytest.mark.redis
def test_it_shares_builds_among_two_workers_on_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path) as broker:
        platform = Platform(tmp_path, compile_command=FAKE_CHILD, broker_url=broker).install()
        with platform.worker("one", "-c", "1"), platform.worker("two", "-c", "1"):
            wait_until(
                lambda: all("ready." in platform.log(name) for name in ("one", "two")),
                240,
                "both workers are up",
            )
            real = (ONNX.read_bytes(), "real", "x86-64-v1", json.dumps(PIPELINE).encode())
            quick = [(b"ok", f"quick-{number}", "x86-64-v3") for number in range(QUICK)]
            ids = submit(platform, real, *quick)
            wait_until(
                lambda: all(
                    row[0] in {"ready", "failed_app", "failed_user"}
                    for row in platform.ask(STATES).values()
                ),
                480,
                "every build has ended",
            )
        assert platform.ask(STATES) == {str(pk): ["ready", 1, ""] for pk in ids}
        leases = platform.ask(WORKERS)
        assert sorted(pk for pk, _ in leases) == sorted(ids)
        assert len({worker for _, worker in leases}) == 2
        verified_on, sections, vectors = platform.ask(REAL.format(job=ids[0]))
        assert (verified_on, sections > 4, vectors >= 16) == ("host", True, True)
