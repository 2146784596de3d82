"""The gate: from counts to a verdict on a stage: promote, roll back, or wait. Pure.

    GateSpec (what was promised) + Evidence (what was counted) -> decide() -> Verdict

Parties of the comparison are the devices that run the new version (treatment) and devices of the
same rollout that still run the old one at the same time (control). Never is a bare threshold put on
the treatment alone, with one exception that has no control by nature: an installation that fails.
"""

from fleet.gates.decision import Decision, MetricVerdict, Verdict, decide
from fleet.gates.evidence import (
    ArmCounts,
    Evidence,
    Increment,
    InstallCounts,
    Ledger,
    evidence_from_json,
)
from fleet.gates.profiles import PROFILES
from fleet.gates.spec import (
    GateSpec,
    GateSpecError,
    MetricSpec,
    spec_from_json,
    spec_from_stored,
)

__all__ = [
    "PROFILES",
    "ArmCounts",
    "Decision",
    "Evidence",
    "GateSpec",
    "GateSpecError",
    "Increment",
    "InstallCounts",
    "Ledger",
    "MetricSpec",
    "MetricVerdict",
    "Verdict",
    "decide",
    "evidence_from_json",
    "spec_from_json",
    "spec_from_stored",
]
