"""What we compile for."""

from builds.models import Target
from compiler.contract.fingerprint import TARGET_LADDER


def targets_seed() -> None:
    """Make a row for every target of the ladder; existing rows stay as they are."""
    known = set(Target.objects.values_list("name", flat=True))
    Target.objects.bulk_create(
        [
            Target(name=name, title=f"{machine}, {len(features)} required features")
            for name, machine, features in TARGET_LADDER
            if name not in known
        ],
        ignore_conflicts=True,
    )
