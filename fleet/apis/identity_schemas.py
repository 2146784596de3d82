"""JSON shapes of pre-authorisations and of alerts about identities."""

from datetime import datetime

from ninja import Field, Schema

from builds.apis.schemas import Asked
from fleet.states import AlertKind


class PreauthorisationIn(Asked):
    serial: str = Field(..., max_length=96)
    key_thumbprint: str = Field(
        ..., max_length=64, description="SHA-256 of the raw public key, lower-case hexadecimal."
    )
    device_class: str = Field("", max_length=32)
    replaces: bool = Field(
        False, description="The device with this serial number shall have this key from now on."
    )


class PreauthorisationOut(Schema):
    id: int
    serial: str
    key_thumbprint: str
    device_class: str
    replaces: bool
    created_by: str
    created_at: datetime
    used_at: datetime | None
    device: int | None = Field(None, alias="device_id", description="Row of the device.")


class PreauthorisationPage(Schema):
    items: list[PreauthorisationOut]
    next: str | None


class AlertOut(Schema):
    id: int
    kind: AlertKind
    serial: str
    device: int | None = Field(None, alias="device_id", description="Row of the device.")
    key_thumbprint: str = Field(..., description="Of the key that was shown.")
    text: str
    count: int = Field(..., description="How often, at most once a minute.")
    first_at: datetime
    last_at: datetime
    settled_at: datetime | None
    settled_by: str
    note: str


class AlertPage(Schema):
    items: list[AlertOut]
    next: str | None
