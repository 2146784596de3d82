"""Errors of this app."""

from http import HTTPStatus
from typing import ClassVar

from builds.common.errors import ApplicationError, ConflictError, InvalidInputError


class UnauthenticatedError(ApplicationError):
    """The request carries no valid token and no session."""

    code: ClassVar[str] = "app.unauthenticated"
    status: ClassVar[HTTPStatus] = HTTPStatus.UNAUTHORIZED


class BlobDigestError(InvalidInputError):
    """The uploaded bytes do not hash to the digest in the address."""

    code: ClassVar[str] = "blob.digest_mismatch"


class BlobTooLargeError(ApplicationError):
    """The upload is larger than `max_upload_bytes`."""

    code: ClassVar[str] = "blob.too_large"
    status: ClassVar[HTTPStatus] = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class BlobLengthRequiredError(ApplicationError):
    """The upload does not say how long it is."""

    code: ClassVar[str] = "blob.length_required"
    status: ClassVar[HTTPStatus] = HTTPStatus.LENGTH_REQUIRED


class StorageFullError(ApplicationError):
    """The blob store has no room left; nothing of the upload was kept."""

    code: ClassVar[str] = "blob.storage_full"
    status: ClassVar[HTTPStatus] = HTTPStatus.INSUFFICIENT_STORAGE
    retryable: ClassVar[bool] = True


class BlobMissingError(InvalidInputError):
    """A submission names files that were not uploaded, or with another size."""

    code: ClassVar[str] = "version.blob_missing"


class PipelineInvalidError(InvalidInputError):
    """`pipeline.json` is missing, is not JSON, or does not fit the files of the submission."""

    code: ClassVar[str] = "version.pipeline_invalid"


class MalformedUploadError(InvalidInputError):
    """A model file is of another kind or was cut off; the compiler's code for the same fault."""

    code: ClassVar[str] = "build.user.malformed_model"


class VersionConflictError(ConflictError):
    """This version was already submitted with other content; versions are immutable."""

    code: ClassVar[str] = "version.exists"


class LeaseLostError(ConflictError):
    """Somebody else holds the lease now; stop working and write nothing."""

    code: ClassVar[str] = "build.lease_lost"


class SigningKeysError(ApplicationError):
    """Signing keys or the update metadata they belong to are missing or do not fit."""

    code: ClassVar[str] = "build.app.signing_keys"
    status: ClassVar[HTTPStatus] = HTTPStatus.SERVICE_UNAVAILABLE
    retryable: ClassVar[bool] = True


class CeremonyError(ApplicationError):
    """A document of a ceremony is malformed, not the next one, or signed by too few."""

    code: ClassVar[str] = "signing.ceremony"
    status: ClassVar[HTTPStatus] = HTTPStatus.CONFLICT


class BuildOutputError(ApplicationError):
    """What the compiler wrote is incomplete or contradicts itself; nothing was published."""

    code: ClassVar[str] = "build.app.output"
    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR


class CompileFailure(ApplicationError):  # noqa: N818 -- a report of another process, with its code
    """The compiler process ended without a bundle.

    Attributes:
        failure_code: Code of the compiler's error; `build.user.*` is the submitter's fault.
        can_retry: Whether the same input may succeed when tried again.
    """

    code: ClassVar[str] = "build.app.compiler"
    status: ClassVar[HTTPStatus] = HTTPStatus.INTERNAL_SERVER_ERROR

    def __init__(self, message: str, *, failure_code: str, hint: str = "", can_retry: bool) -> None:
        super().__init__(message, hint=hint)
        self.failure_code = failure_code
        self.can_retry = can_retry

    @property
    def is_user_fault(self) -> bool:
        """Return whether the submission itself is at fault."""
        return self.failure_code.startswith("build.user.")
