"""Degrade rules: set by whom may, previewed, audited, signed so that a device follows them."""

import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from builds.common.access_models import AuditEvent
from builds.common.roles import Role
from builds.services.signing import keys_generate, repositories_init, trust_anchors
from compiler.contract.canonical import canonical_bytes
from device_agent.errors import TrustError
from device_agent.update.director import Expected, verify_rules
from fleet.models import DegradeRules, Device
from fleet.selectors.rules import rules_of
from fleet.services.members import group_devices
from tests.factories.builds import make_model
from tests.factories.fleet import make_device, make_group
from tests.unit.fleet.test_apis import Agent, Api

pytestmark = pytest.mark.django_db
NONCE = "ab" * 16
OVER = f"/rules?nonce={NONCE}"


def document(name: str = "hot", **changes) -> dict:
    row = {
        "name": name,
        "when": "temperature > 55 C for 10 s",
        "leave": "temperature < 50 C",
        "rung": "fewer_experts",
        "priority": 50,
        "cooldown_s": 0.5,
        **changes,
    }
    return {"schema": "sparsefleet.degrade/1", "rules": [row]}


@pytest.fixture
def manager() -> Api:
    return Api(Role.RELEASE_MANAGER)


@pytest.fixture
def device() -> Device:
    keys_generate()
    repositories_init()
    return make_device(make_model(), device_class="phone", tags=["lab", "blue"])


def put(manager: Api, rules: dict | None, group: str = "", note: str = "") -> int:
    answer = manager.post("/degrade-rules", {"group": group, "rules": rules, "note": note})
    assert answer.status_code == 201, answer.content
    return answer.json()["revision"]


def followed(device: Device) -> tuple[int, list[str] | None]:
    """Ask as the device does; return revision and names of the rules it would follow."""
    answer = Agent(device.pk).get(OVER)
    assert answer.status_code == 200, answer.content
    root = canonical_bytes(trust_anchors()["director_root"])
    expected = Expected(device.device_id, device.key_thumbprint, NONCE, datetime.now(UTC))
    order = verify_rules(answer.content, root, lambda _version: None, expected)
    rules = order.rules()
    return order.revision, None if rules is None else [rule.name for rule in rules]


def test_a_device_follows_its_group_then_the_fleet_then_itself(manager, device):
    assert Agent(device.pk).get(OVER).status_code == 404
    mine = make_group(device.model, device_class="phone", tags=["lab"])
    other = make_group(device.model, device_class="car")
    first = put(manager, document("fleet"))
    assert followed(device) == (first, ["fleet"])
    put(manager, document("mine"), mine.name)
    last = put(manager, document("other"), other.name)
    assert followed(device) == (last, ["mine"]), "the revision is that of all rules"
    last = put(manager, None, mine.name)
    assert followed(device) == (last, ["fleet"])
    last = put(manager, None)
    assert followed(device) == (last, None)


def test_a_device_believes_only_what_is_for_it(manager, device):
    put(manager, document())
    answer = Agent(device.pk).get(OVER).content
    root = canonical_bytes(trust_anchors()["director_root"])
    for who, key, nonce in (
        ("f" * 32, device.key_thumbprint, NONCE),
        (device.device_id, "f" * 64, NONCE),
        (device.device_id, device.key_thumbprint, "cd" * 16),
    ):
        expected = Expected(who, key, nonce, datetime.now(UTC))
        with pytest.raises(TrustError):
            verify_rules(answer, root, lambda _version: None, expected)


def test_a_device_has_to_ask_properly(manager, device):
    put(manager, document())
    agent = Agent(device.pk)
    for bad in ("", "xyz", "AB" * 16):
        assert agent.get(f"/rules?nonce={bad}").status_code == 422
    assert agent.post("/rules", b"{}").status_code == 405


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (document(when="__import__('os') > 5"), "character 1"),
        (document(rung="full_dense"), "unknown rung"),
        (document(leave="battery > 5 %"), "looks at nothing"),
        ({"schema": "sparsefleet.degrade/1"}, "schema"),
        ({"schema": "sparsefleet.degrade/1", "rules": {}}, "must be a list"),
    ],
)
def test_rules_that_no_device_would_take_are_refused_with_the_reason(manager, rules, message):
    for path in ("/degrade-rules", "/degrade-rules/preview"):
        answer = manager.post(path, {"rules": rules})
        assert answer.status_code == 422
        assert message in answer.json()["detail"]
    assert manager.post("/degrade-rules", {"rules": None, "group": "none"}).status_code == 404
    assert not DegradeRules.objects.exists()


def test_a_preview_says_what_would_be_reached_and_changes_nothing(manager, device):
    group = make_group(device.model, device_class="phone")
    make_device(device.model)
    two = document("a", priority=1)
    two["rules"] += document("b", priority=9)["rules"]
    for name, devices in (("", 2), (group.name, 1)):
        answer = manager.post("/degrade-rules/preview", {"rules": two, "group": name}).json()
        assert answer["devices"] == devices
        assert [row["name"] for row in answer["rules"]] == ["b", "a"]
    assert not DegradeRules.objects.exists()


def test_only_a_release_manager_sets_and_the_audit_says_who(manager, device):
    for role in (Role.VIEWER, Role.DEVELOPER, Role.APPROVER):
        assert Api(role).post("/degrade-rules", {"rules": document()}).status_code == 403
    revision = put(manager, document(), note="heat in the lab")
    line = AuditEvent.objects.get(action="rules.set")
    assert (line.object_id, line.detail["note"]) == (str(revision), "heat in the lab")
    listed = manager.get("/degrade-rules").json()["items"]
    assert [(row["revision"], row["rules"]) for row in listed] == [(revision, document())]
    assert Api(Role.VIEWER).get("/degrade-rules").status_code == 200


def test_a_group_has_the_devices_that_its_members_are(device):
    others = [
        make_device(device.model, "x86-64-v2", device_class="phone", tags=["lab"]),
        make_device(device.model, tags=["blue"]),
        make_device(make_model(name="another"), device_class="phone"),
    ]
    for wanted in (
        {},
        {"device_class": "phone"},
        {"tags": ["lab", "blue"]},
        {"target": "x86-64-v2"},
    ):
        group = make_group(device.model, **wanted)
        members = {row.pk for row in group_devices(group)}
        assert {one.pk for one in (device, *others) if group.has(one)} == members


def test_it_chooses_in_one_query_for_many_rules(manager, device, django_assert_num_queries):
    for number in range(5):
        put(manager, document(f"rule {number}"), make_group(device.model).name)
    row = Device.objects.select_related("target").get(pk=device.pk)
    with django_assert_num_queries(1):
        assert rules_of(row).document == document("rule 4")


class TestCommand:
    @staticmethod
    def run(*arguments: str) -> str:
        output = io.StringIO()
        call_command("degrade_rules", *arguments, stdout=output)
        return output.getvalue()

    def test_it_previews_sets_shows_and_clears(self, device, tmp_path: Path):
        path = tmp_path / "rules.json"
        path.write_text(json.dumps(document()))
        assert "no rules are set" in self.run("show")
        told = self.run("preview", "--file", str(path))
        assert "hot (50): temperature > 55 C for 10 s -> fewer_experts" in told
        assert "1 rules, 1 devices" in told
        assert "fewer_experts: on how many of them the bundle has it is unknown" in told
        path.write_text(json.dumps(document()).replace("fewer_experts", "fewer_bits"))
        told = self.run("preview", "--file", str(path))
        assert "fewer_bits: no bundle can have it: devices go to what theirs has" in told
        path.write_text(json.dumps(document()))
        assert not DegradeRules.objects.exists()
        self.run("set", "--file", str(path), "--note", "try")
        assert '"name": "hot"' in self.run("show")
        self.run("clear")
        assert "taken back" in self.run("show")
        assert followed(device)[1] is None

    def test_it_clears_only_what_is_set(self, device, tmp_path: Path):
        path = tmp_path / "rules.json"
        path.write_text(json.dumps(document()))
        group = make_group(device.model).name
        assert "nothing to clear" in self.run("clear")
        self.run("set", "--file", str(path))
        assert "nothing to clear" in self.run("clear", "--group", group)
        assert DegradeRules.objects.count() == 1
        self.run("clear")
        assert "nothing to clear" in self.run("clear")
        assert DegradeRules.objects.count() == 2

    def test_it_shows_the_rules_of_one_group(self, device, tmp_path: Path):
        path = tmp_path / "rules.json"
        path.write_text(json.dumps(document()))
        group = make_group(device.model, device_class="phone").name
        self.run("set", "--file", str(path))
        assert f"no rules are set for group {group}" in self.run("show", "--group", group)
        self.run("set", "--file", str(path), "--group", group)
        assert "of the fleet" not in self.run("show", "--group", group)
        assert "of the fleet" in self.run("show")
        with pytest.raises(CommandError, match="no group 'nope'"):
            self.run("show", "--group", "nope")
        with pytest.raises(CommandError, match="take none"):
            self.run("show", "--file", str(path))

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": "x"}', "[" * 9000])
    def test_it_refuses_what_is_no_document(self, tmp_path: Path, text: str):
        path = tmp_path / "rules.json"
        path.write_text(text)
        with pytest.raises(CommandError):
            self.run("set", "--file", str(path))
        with pytest.raises(CommandError, match=r"no rules in .*absent: No such file or directory"):
            self.run("set", "--file", str(tmp_path / "absent"))
        with pytest.raises(CommandError, match="need --file"):
            self.run("set")
        with pytest.raises(CommandError, match="no group"):
            self.run("clear", "--group", "none")
