"""The form of a new rollout: what, who, how, and when the gate decides.

Empty numbers of the gate mean those of the profile. The form checks shape only; whether group,
version and numbers fit together is checked by the service, whose error is shown on the form.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from django import forms
from django.core.exceptions import ValidationError
from django.db.models import QuerySet

from builds.models import ModelVersion
from builds.states import VersionState
from compiler.contract.protocol import NetworkPolicy
from fleet.cohorts import Goal
from fleet.gates import PROFILES
from fleet.models import Group
from fleet.networks import DEFAULT_WAIT_S, MAX_WAIT_S
from fleet.services.plans import RolloutRequest

HOUR_S: Final = 3600.0
MAX_STAGES: Final = 20
MAX_STAGES_TEXT: Final = 400
MAX_GROUP_NAME: Final = 64
DEFAULT_STAGES: Final = "5 %, 25 %, 100 %"
_STAGE: Final = re.compile(r"(\d{1,9}(?:\.\d{1,4})?)\s*(%|devices?)?", re.ASCII)
# form field -> (label, help); the names are those of `fleet.gates.GateSpec`
GATE_NUMBERS: Final[Mapping[str, tuple[str, str]]] = {
    "hold_evidence": (
        "Hold at, N : 1",
        "evidence against the version at which nothing is promoted",
    ),
    "safe_evidence": ("Safety to show, N : 1", "for every metric, before a promotion"),
    "min_dwell_s": ("Shortest stage, seconds", "from its opening to its promotion"),
    "min_answers": ("Fewest answers", "of the stage's new devices, and of its control"),
    "max_wait_s": ("Hold for a person after, seconds", "without a promotion"),
    "silence_s": ("Silent after, seconds", "without a sign of life"),
}


@dataclass(frozen=True, slots=True)
class FormPart:
    """Fields that belong together."""

    title: str
    text: str
    fields: tuple[forms.BoundField, ...]


class RolloutForm(forms.Form):
    """Everything that a release manager decides about a new rollout."""

    name = forms.CharField(
        label="Name", max_length=100, required=False, help_text="for people; may be empty"
    )
    version = forms.ModelChoiceField(label="Version", queryset=ModelVersion.objects.none())
    group = forms.ModelChoiceField(
        label="Group",
        queryset=Group.objects.none(),
        required=False,
        empty_label="every device of the model",
    )
    needs_approval = forms.BooleanField(label="Somebody else has to approve it", required=False)
    stages = forms.CharField(
        label="Stages",
        max_length=MAX_STAGES_TEXT,
        initial=DEFAULT_STAGES,
        help_text="shares of the group or counts of devices, growing: 2 devices, 25 %, 100 %",
    )
    network_policy = forms.ChoiceField(
        label="On metered networks",
        initial=NetworkPolicy.ANY.value,
        required=False,
        choices=[
            (NetworkPolicy.ANY.value, "fetch as everywhere"),
            (NetworkPolicy.DELTA_ONLY.value, "fetch deltas only"),
            (NetworkPolicy.WAIT_UNMETERED.value, "wait for another network"),
        ],
        help_text="a device says in its settings whether its network is metered",
    )
    unmetered_wait_h = forms.FloatField(
        label="Wait at most, hours",
        required=False,
        min_value=0,
        max_value=MAX_WAIT_S / HOUR_S,
        help_text="for another network; after that everything is fetched",
    )
    profile = forms.ChoiceField(
        label="Profile",
        initial="default",
        choices=[(name, name) for name in PROFILES],
        help_text="margins and times of the gate; single numbers can be changed here",
    )
    alpha = forms.FloatField(
        label="Roll back at, N : 1",
        required=False,
        min_value=5,
        max_value=1e6,
        help_text="evidence against the version; a good one reaches 100 : 1 in fewer than 1 of 100",
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 -- Django's signature
        super().__init__(*args, **kwargs)
        self._choice("version").queryset = _versions()
        self._choice("group").queryset = Group.objects.select_related("model").order_by("name")
        profile = PROFILES["default"]
        hours = DEFAULT_WAIT_S / HOUR_S
        self.fields["unmetered_wait_h"].widget.attrs["placeholder"] = f"{hours:g}"
        self.fields["alpha"].widget.attrs["placeholder"] = f"{1 / profile.alpha:g}"
        for field, (label, text) in GATE_NUMBERS.items():
            number = forms.FloatField(label=label, required=False, min_value=0, help_text=text)
            number.widget.attrs["placeholder"] = f"{getattr(profile, field):g}"
            self.fields[field] = number

    @property
    def parts(self) -> tuple[FormPart, ...]:
        """Return the fields in the groups in which they are shown."""
        rows = (
            ("What and who", "", ("version", "group", "name", "needs_approval")),
            ("How", "", ("stages", "profile", "network_policy", "unmetered_wait_h")),
            ("Gate", "Empty numbers are those of the profile.", ("alpha", *GATE_NUMBERS)),
        )
        return tuple(
            FormPart(title, text, tuple(self[name] for name in names))
            for title, text, names in rows
        )

    def clean(self) -> dict[str, Any]:
        """Check that version and group belong together."""
        data = super().clean() or {}
        version, group = data.get("version"), data.get("group")
        if version and group and version.model_id != group.model_id:
            self.add_error("group", f"This group is about {group.model.name}.")
        return data

    def clean_stages(self) -> list[Goal]:
        """Return the stages as the service takes them."""
        return parse_stages(self.cleaned_data["stages"])

    def request(self) -> RolloutRequest:
        """Return the request to the service. The form must be valid.

        Without a group it names the one of every device, see `everyone`; the caller makes it.
        """
        data = self.cleaned_data
        return RolloutRequest(
            model=data["version"].model.name,
            version=data["version"].version,
            group=data["group"].name if data["group"] else everyone(data["version"].model.name),
            goals=data["stages"],
            gate=self.gate(),
            name=data["name"],
            needs_approval=data["needs_approval"],
            network_policy=NetworkPolicy(data["network_policy"] or NetworkPolicy.ANY),
            unmetered_wait_s=self.unmetered_wait_s(),
        )

    def unmetered_wait_s(self) -> float:
        """Return how long updates may wait for another network, seconds."""
        hours = self.cleaned_data["unmetered_wait_h"]
        return DEFAULT_WAIT_S if hours is None else float(hours) * HOUR_S

    def gate(self) -> dict[str, object]:
        """Return the gate as the service takes it: a profile and what differs from it."""
        data = self.cleaned_data
        gate: dict[str, object] = {"profile": data["profile"]}
        if data["alpha"] is not None:
            gate["alpha"] = 1 / data["alpha"]
        for name in GATE_NUMBERS:
            if data[name] is not None:
                gate[name] = int(data[name]) if name == "min_answers" else data[name]
        return gate

    def _choice(self, name: str) -> "forms.ModelChoiceField[Any]":
        field = self.fields[name]
        assert isinstance(field, forms.ModelChoiceField)
        return field


def everyone(model: str) -> str:
    """Return the name of the group of all devices of a model."""
    return f"all-{model}"[:MAX_GROUP_NAME]


class PreauthorisationForm(forms.Form):
    """One device that may join with one key."""

    serial = forms.CharField(label="Serial number", max_length=96)
    key_thumbprint = forms.CharField(
        label="Key thumbprint",
        max_length=64,
        help_text="SHA-256 of its public key; `python -m device_agent thumbprint` prints it",
    )
    device_class = forms.CharField(
        label="Class", max_length=32, required=False, help_text="empty: what the device says"
    )
    replaces = forms.BooleanField(
        label="The device is enrolled and shall have this key from now on", required=False
    )


def parse_stages(text: str) -> list[Goal]:
    """Read `2 devices, 25 %, 100 %` as goals.

    Raises:
        ValidationError: No stage, too many, a word that is no stage, or shares that do not grow.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or len(words) > MAX_STAGES:
        raise ValidationError(f"Give 1 to {MAX_STAGES} stages, separated by commas.")
    stages = [_stage(word) for word in words]
    for sizes in (
        [stage.percent for stage in stages if stage.percent is not None],
        [stage.count for stage in stages if stage.count is not None],
    ):
        if sizes != sorted(set(sizes)):
            raise ValidationError("Every stage must be larger than the one before it.")
    return stages


def _stage(word: str) -> Goal:
    match = _STAGE.fullmatch(word)
    if match is None:
        raise ValidationError(f"“{word}” is no stage: write 25 % or 2 devices.")
    number, unit = match.groups()
    if unit == "%":
        if not 0 < float(number) <= 100:
            raise ValidationError(f"“{word}”: a share is above 0 % and at most 100 %.")
        return Goal(percent=float(number))
    if "." in number or int(number) < 1:
        raise ValidationError(f"“{word}”: a count of devices is a whole number above 0.")
    return Goal(count=int(number))


def _versions() -> QuerySet[ModelVersion]:
    valid = ModelVersion.objects.filter(state=VersionState.VALIDATED.value)
    return valid.select_related("model").order_by("model__name", "-release_seq")
