"""Errors of this app."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import ClassVar

from builds.common.errors import (
    ApplicationError,
    ConflictError,
    ForbiddenError,
    InvalidInputError,
)
from compiler.contract.protocol import CODE_CLOCK


class DeviceUnauthorizedError(ApplicationError):
    """No valid session token: exchange a signed request for a new one at `/d/v1/token`."""

    code: ClassVar[str] = "fleet.token"
    status: ClassVar[HTTPStatus] = HTTPStatus.UNAUTHORIZED


class DeviceSignatureError(ApplicationError):
    """The request is not signed by the device key in the way that the protocol asks for."""

    code: ClassVar[str] = "fleet.signature"
    status: ClassVar[HTTPStatus] = HTTPStatus.UNAUTHORIZED


class ReplayError(DeviceSignatureError):
    """This signed request was used before."""

    code: ClassVar[str] = "fleet.replay"


class DeviceClockError(DeviceSignatureError):
    """The signature is good and its time is not: sign a nonce of `/d/v1/time-nonce` instead."""

    code: ClassVar[str] = CODE_CLOCK


class TooOftenError(ApplicationError):
    """This address asked too often; ask again later."""

    code: ClassVar[str] = "fleet.too_often"
    status: ClassVar[HTTPStatus] = HTTPStatus.TOO_MANY_REQUESTS
    retryable: ClassVar[bool] = True


class ClientCertificateError(ForbiddenError):
    """The device API is only for those who show a client certificate to the proxy."""

    code: ClassVar[str] = "fleet.client_certificate"


class ClaimError(ForbiddenError):
    """The claim token is unknown, wrong, used up or expired."""

    code: ClassVar[str] = "fleet.claim"


class DeviceStateError(ForbiddenError):
    """The device is not (or no longer) a member of the fleet."""

    code: ClassVar[str] = "fleet.device_state"


class SerialTakenError(ConflictError):
    """Another key is enrolled or pre-authorised under this serial number."""

    code: ClassVar[str] = "fleet.serial_taken"


class KeyTakenError(ConflictError):
    """A device has this key, or had it before it was replaced."""

    code: ClassVar[str] = "fleet.key_taken"


class RotationError(ConflictError):
    """The key of the device was replaced by somebody else first."""

    code: ClassVar[str] = "fleet.rotation"


class UpdateCancelledError(ApplicationError):
    """The update may no longer proceed: stop, drop what was fetched, keep the running bundle."""

    code: ClassVar[str] = "fleet.update_cancelled"
    status: ClassVar[HTTPStatus] = HTTPStatus.GONE


class UpdateWaitsError(ApplicationError):
    """The update is still wanted and has to wait for another network: ask again later."""

    code: ClassVar[str] = "fleet.update_waits"
    status: ClassVar[HTTPStatus] = HTTPStatus.TOO_EARLY
    retryable: ClassVar[bool] = True


class RetryError(ConflictError):
    """Nothing of this rollout can be tried again now."""

    code: ClassVar[str] = "fleet.retry"


class ReportContradictsError(InvalidInputError):
    """The report says two things that cannot both be true."""

    code: ClassVar[str] = "fleet.report_contradicts"


class RolloutConflictError(ConflictError):
    """Another rollout of the same model is under way."""

    code: ClassVar[str] = "fleet.rollout_conflict"


class FirstInstallError(InvalidInputError):
    """A gate without comparison is for the first version only, and the first version needs it."""

    code: ClassVar[str] = "fleet.first_install"


class ApprovalError(ForbiddenError):
    """Whoever made a rollout may not approve it."""

    code: ClassVar[str] = "fleet.approval"


class MethodNotAllowedError(ApplicationError):
    """This address does not know the method of the request; `allow` names those that it knows."""

    code: ClassVar[str] = "fleet.method"
    status: ClassVar[HTTPStatus] = HTTPStatus.METHOD_NOT_ALLOWED

    def __init__(self, methods: Sequence[str]) -> None:
        self.allow = ", ".join(methods)
        super().__init__("the method is not allowed here", hint=f"use {self.allow}")


class StaleSnapshotError(ApplicationError):
    """This process cannot tell whether its offers are still good; ask again soon."""

    code: ClassVar[str] = "fleet.snapshot_stale"
    status: ClassVar[HTTPStatus] = HTTPStatus.SERVICE_UNAVAILABLE
    retryable: ClassVar[bool] = True
