"""What devices and operators may call devices."""

import re
from typing import Final

from builds.common.errors import InvalidInputError
from fleet.models.devices import CLASS_PATTERN

MAX_LABEL: Final = 96


def require_label(what: str, value: str) -> None:
    """Check a serial number or a name.

    Raises:
        InvalidInputError: Empty, too long or not printable.
    """
    if not 1 <= len(value) <= MAX_LABEL or not value.isprintable():
        raise InvalidInputError(f"{what} must be 1..{MAX_LABEL} printable characters")


def require_class(value: str) -> None:
    """Check the name of a device class.

    Raises:
        InvalidInputError: It does not match the pattern of classes.
    """
    if re.fullmatch(CLASS_PATTERN, value) is None:
        raise InvalidInputError(f"device_class must match {CLASS_PATTERN}")
