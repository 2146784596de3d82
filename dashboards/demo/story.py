"""The main job, step by step. Everything here goes over HTTP, as CI and a release manager would."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from dashboards.demo.client import ApiClient, Document, wait_for
from dashboards.demo.errors import DemoError
from dashboards.demo.outcome import Outcome, kilobytes, percent
from dashboards.demo.processes import ProcessGroup

MODEL: Final = "edgecard"
MODEL_TITLE: Final = "EdgeCard: questions about cards"
GROUP: Final = "everything"
BUILD_TIMEOUT_S: Final = 600.0
ROLLOUT_TIMEOUT_S: Final = 300.0
GATE: Final = {"profile": "lab", "min_accuracy_drop": 0.1}
FIRST_GATE: Final = {"profile": "none-first-install"}
STAGES: Final = ({"percent": 20}, {"percent": 50}, {"percent": 100})
ENDED: Final = frozenset({"succeeded", "stopped", "rolled_back", "failed"})
BUILD_ENDED: Final = frozenset({"ready", "failed_user", "failed_app"})


@dataclass(slots=True)
class Story:
    """What the steps share.

    Attributes:
        ci: The REST client with CI's token.
        desk: The REST client with the release manager's token.
        group: Child processes, to notice when one dies.
        submissions: Version -> folder of the submission.
        devices: How many devices the demo has.
        durations: Step -> seconds.
    """

    ci: ApiClient
    desk: ApiClient
    group: ProcessGroup
    submissions: Mapping[str, Path]
    devices: int
    outcome: Outcome
    console: Console
    durations: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, title: str) -> Any:  # noqa: ANN401 -- a context manager's generator
        """Show a step while it runs and how long it took."""
        started = time.monotonic()
        if not self.console.is_terminal:
            self.console.print(f"  {title} ...")
        with self.console.status(f"{title} ..."):
            yield
        self.durations[title] = time.monotonic() - started
        self.console.print(f"[green]✓[/] {title} [dim]({self.durations[title]:.1f} s)[/]")

    def wait(self, look: Callable[[], Any], what: str, timeout_s: float) -> Any:  # noqa: ANN401
        """Wait for `look` to return something while all processes live."""
        return wait_for(look, what=what, timeout_s=timeout_s, watch=self.group.require_alive)


def wait_for_devices(story: Story) -> None:
    """Wait until every agent has enrolled; that is what makes targets active."""
    with story.step(f"{story.devices} agents probe their hardware and enrol with their own keys"):
        story.wait(
            lambda: len(_devices(story)) == story.devices or None, "enrolment of all agents", 120.0
        )
    targets = sorted({device["target"] for device in _devices(story)})
    story.outcome.check(
        "the fleet has three targets", ok=len(targets) == 3, seen=", ".join(targets)
    )


def submit_and_build(story: Story, version: str, base: str | None) -> None:
    """CI submits a version; wait until it is built for every target."""
    with story.step(f"CI submits version {version}"):
        story.ci.submit(MODEL, version, story.submissions[version], base=base)
    with story.step(f"the worker compiles version {version} for every target"):
        builds = story.wait(
            lambda: _ended_builds(story, version), f"builds of {version}", BUILD_TIMEOUT_S
        )
    _record_builds(story, version, builds)


def first_install(story: Story, version: str) -> None:
    """Install the first version everywhere; there is nothing to compare it with."""
    story.desk.post("/groups", {"name": GROUP, "model": MODEL, "filter": {}})
    with story.step(f"a rollout delivers version {version} to {story.devices} devices"):
        rollout = _run_rollout(story, version, [{"percent": 100}], FIRST_GATE)
    state = rollout["state"]
    story.outcome.check(f"version {version} is installed", ok=state == "succeeded", seen=state)
    _wait_for_answers(story, version)


def staged_update(story: Story, version: str) -> None:
    """Promote a good version stage by stage."""
    with story.step(f"a staged rollout with a gate promotes version {version}"):
        rollout = _run_rollout(story, version, STAGES, GATE)
    passed = [stage["state"] for stage in rollout["stages"]]
    state = rollout["state"]
    seen = f"{state}; stages: {', '.join(passed)}"
    ok = state == "succeeded" and set(passed) == {"passed"}
    story.outcome.check(f"version {version} is promoted stage by stage", ok=ok, seen=seen)
    _record_deltas(story, version, rollout)
    _wait_for_answers(story, version)


def bad_update(story: Story, version: str, good: str) -> None:
    """Start a bad version; the gate has to stop it and bring its devices back."""
    before = _answers_by_device(story, good)
    with story.step(f"version {version} starts; the gate stops it and devices go back to {good}"):
        rollout = _run_rollout(story, version, STAGES, GATE)
    exposed = rollout["counts"]["devices_exposed"]
    story.outcome.figures["devices_exposed_by_bad_version"] = exposed
    story.outcome.figures["devices"] = story.devices
    story.outcome.row(
        f"version {version} (bad)", "devices exposed", f"{exposed} of {story.devices}"
    )
    look = rollout["last_look"] or {}
    story.outcome.row(
        f"version {version} (bad)", "the gate said", "; ".join(look.get("reasons", []))
    )
    state = rollout["state"]
    story.outcome.check(f"version {version} is rolled back", ok=state == "rolled_back", seen=state)
    opened = [stage["index"] for stage in rollout["stages"] if stage["opened_at"]]
    seen = f"{len(opened)} of {len(rollout['stages'])} stages opened"
    story.outcome.check("it was stopped in the first stage", ok=opened == [0], seen=seen)
    _check_the_way_back(story, rollout, good, before)


def accuracy(story: Story, versions: Sequence[str]) -> None:
    """Put accuracy measured on devices beside what CI claimed."""
    measured = {version: _measured(story, version) for version in versions}
    for version in versions:
        claim = story.ci.get(f"/models/{MODEL}/versions/{version}")["claim"].get("value")
        scored, correct, answers, failures = measured[version]
        ratio = correct / scored if scored else None
        story.outcome.figures[f"accuracy_{version}"] = {
            "claimed_by_ci": claim,
            "measured_on_devices": ratio,
            "scored_answers": scored,
            "failures": failures,
        }
        story.outcome.row(
            f"version {version}",
            "accuracy",
            f"CI claimed {100 * float(claim or 0):.1f} %, devices measured "
            f"{percent(correct, scored)} of {scored} answers, {failures} cut off or failed",
        )
        story.outcome.check(
            f"devices answered with version {version}", ok=answers > 0, seen=f"{answers} answers"
        )


def _run_rollout(
    story: Story, version: str, stages: Sequence[Document], gate: Document
) -> Document:
    body = {
        "model": MODEL,
        "version": version,
        "group": GROUP,
        "stages": list(stages),
        "gate": gate,
    }
    rollout = story.desk.post("/rollouts", body, key=f"demo-{version}-{time.monotonic_ns()}")
    path = f"/rollouts/{rollout['id']}"
    story.desk.post(f"{path}/start")

    def ended() -> Document | None:
        now = story.desk.get(path)
        if now["state"] == "paused":
            look = now["last_look"] or {}
            raise DemoError(f"the rollout of {version} is held: {look.get('reasons')}")
        return now if now["state"] in ENDED else None

    result: Document = story.wait(ended, f"the rollout of {version}", ROLLOUT_TIMEOUT_S)
    return result


def _ended_builds(story: Story, version: str) -> Sequence[Document] | None:
    document = story.ci.get(f"/models/{MODEL}/versions/{version}")
    if document["error"]:
        error = document["error"]
        raise DemoError(f"version {version}: {error['message']}", hint=error["hint"])
    builds = [story.ci.get(f"/builds/{number}") for number in document["builds"]]
    done = builds and all(build["state"] in BUILD_ENDED for build in builds)
    return builds if done else None


def _record_builds(story: Story, version: str, builds: Sequence[Document]) -> None:
    for build in builds:
        error = build["error"] or {}
        seen = error.get("message") or f"{build['state']}"
        story.outcome.check(
            f"{version} builds for {build['target']}", ok=build["state"] == "ready", seen=seen
        )
        if build["state"] != "ready":
            continue
        bundle = story.ci.get(f"/bundles/{build['manifest_sha256']}")
        seconds = {stage["name"]: stage["seconds"] for stage in build["report"].get("stages", [])}
        story.outcome.figures.setdefault("builds", {})[f"{version} {build['target']}"] = {
            "seconds": seconds,
            "bytes": bundle["total_bytes"],
            "verified_on": bundle["verified_on"],
        }
        story.outcome.row(
            f"version {version}",
            f"bundle for {build['target']}",
            f"{kilobytes(bundle['total_bytes'])}, compiled in {sum(seconds.values()):.1f} s, "
            f"self-test on {bundle['verified_on']}",
        )


def _record_deltas(story: Story, version: str, rollout: Document) -> None:
    names = {build["manifest_sha256"]: build["target"] for build in _builds(story, version)}
    for delta in story.ci.get("/deltas", limit=100)["items"]:
        target = names.get(delta["manifest_sha256"])
        if target is None or delta["state"] != "ready":
            continue
        sizes = {key: delta[key] for key in ("full_bytes", "size_bytes", "bsdiff4_bytes")}
        story.outcome.figures.setdefault("deltas", {})[f"{version} {target}"] = sizes
        story.outcome.row(
            f"version {version}",
            f"delta for {target}",
            f"full {kilobytes(delta['full_bytes'])}, delta {kilobytes(delta['size_bytes'])}, "
            f"bsdiff4 would need {kilobytes(delta['bsdiff4_bytes'] or 0)}",
        )
    updates = _updates_of(story, rollout["id"])
    by_delta = [update for update in updates if update["used_delta"]]
    story.outcome.check(
        f"version {version} travels as a delta",
        ok=bool(updates) and len(by_delta) == len(updates),
        seen=f"{len(by_delta)} of {len(updates)} updates",
    )
    payload = sum(update["downloaded_bytes"] for update in updates)
    story.outcome.figures[f"downloaded_bytes_{version}"] = payload
    story.outcome.row(f"version {version}", "downloaded by all devices", kilobytes(payload))


def _check_the_way_back(
    story: Story, rollout: Document, good: str, before: Mapping[int, int]
) -> None:
    updates = _updates_of(story, rollout["id"], "rollback")
    payload = sum(update["downloaded_bytes"] for update in updates)
    exposed = rollout["counts"]["devices_exposed"]
    story.outcome.check(
        f"devices came back to {good} without downloading anything",
        # More may be ordered back than switched: one that was about to switch is told as well.
        ok=payload == 0 and len(updates) >= exposed > 0,
        seen=f"{len(updates)} devices, {payload} bytes",
    )
    running = {device["running_version"] for device in _devices(story)}
    story.outcome.check(
        f"every device runs {good}", ok=running == {good}, seen=", ".join(sorted(running))
    )
    affected = sorted({update["device_id"] for update in updates})
    with story.step(f"the affected devices answer with {good} again"):
        story.wait(
            lambda: _all_above(_answers_by_device(story, good), before, affected),
            f"answers of devices {affected}",
            60.0,
        )
    story.outcome.check(f"they answer with {good} again", ok=True, seen=f"{len(affected)} devices")


def _all_above(
    now: Mapping[int, int], before: Mapping[int, int], devices: Sequence[int]
) -> bool | None:
    return all(now.get(pk, 0) > before.get(pk, 0) for pk in devices) or None


def _wait_for_answers(story: Story, version: str) -> None:
    with story.step(f"devices answer questions with version {version}"):
        story.wait(
            lambda: (
                len([n for n in _answers_by_device(story, version).values() if n]) == story.devices
                or None
            ),
            f"answers of all devices with {version}",
            90.0,
        )


def _devices(story: Story) -> Sequence[Document]:
    items: Sequence[Document] = story.desk.get("/devices", limit=100)["items"]
    return items


def _device_details(story: Story) -> Sequence[Document]:
    return [story.desk.get(f"/devices/{device['id']}") for device in _devices(story)]


def _updates_of(story: Story, rollout_id: int, kind: str = "") -> Sequence[Document]:
    path = f"/rollouts/{rollout_id}/updates"
    items: Sequence[Document] = story.desk.get(path, limit=100, kind=kind)["items"]
    return items


def _builds(story: Story, version: str) -> Sequence[Document]:
    document = story.ci.get(f"/models/{MODEL}/versions/{version}")
    return [story.ci.get(f"/builds/{number}") for number in document["builds"]]


def _manifests(story: Story, version: str) -> frozenset[str]:
    return frozenset(build["manifest_sha256"] for build in _builds(story, version))


def _answers_by_device(story: Story, version: str) -> Mapping[int, int]:
    manifests = _manifests(story, version)
    return {
        device["id"]: sum(
            row["answers"] for row in device["answers"] if row["manifest_sha256"] in manifests
        )
        for device in _device_details(story)
    }


def _measured(story: Story, version: str) -> tuple[int, int, int, int]:
    manifests = _manifests(story, version)
    totals = {"scored": 0, "correct": 0, "answers": 0, "failures": 0}
    for device in _device_details(story):
        for row in device["answers"]:
            if row["manifest_sha256"] in manifests:
                for name in totals:
                    totals[name] += row[name]
    return totals["scored"], totals["correct"], totals["answers"], totals["failures"]
