"""Errors of the device agent: one root, a stable code, and how each ends an update.

A retry is a property of the class and not of the caller; so is the state in which an update ends
when the error stops it. Boundaries wrap: the HTTP client, the disk, the native runtime and the
verifier let only these errors out.
"""

from typing import ClassVar

from compiler.contract.protocol import UpdateState


class AgentError(Exception):
    """Root of everything the agent raises on purpose.

    Attributes:
        code: Stable, dotted identifier; it reaches the server in reports.
        hint: What the reader can do about it, or an empty string.
        retryable: Whether the same call may succeed later, without anybody changing anything.
        ends_as: State of an update that this error stops.
    """

    code: ClassVar[str] = "agent.error"
    retryable: ClassVar[bool] = False
    ends_as: ClassVar[UpdateState] = UpdateState.FAILED

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigurationError(AgentError):
    """A setting is missing, unknown or out of range: fix the configuration and start again."""

    code: ClassVar[str] = "agent.configuration"


class NotEnrolledError(AgentError):
    """The device has no identity on the server yet: run `enrol`."""

    code: ClassVar[str] = "agent.not_enrolled"


class ContentKeyError(AgentError):
    """A confidential bundle cannot be opened here: no key came, or one for somebody else."""

    code: ClassVar[str] = "agent.content_key"


class NoBundleError(AgentError):
    """The device runs nothing yet, so there is nobody to answer."""

    code: ClassVar[str] = "agent.no_bundle"


# --- disk ---


class DiskError(AgentError):
    """A file could not be read or written."""

    code: ClassVar[str] = "agent.disk"


class DiskFullError(DiskError):
    """No space is left; what the update wrote is dropped, the running bundle is untouched."""

    code: ClassVar[str] = "agent.disk_full"


class StateBusyError(AgentError):
    """Another agent works on the same state folder."""

    code: ClassVar[str] = "agent.state_busy"


class StateLostError(AgentError):
    """The floors of an enrolled device cannot be read: no update is safe until it enrols anew."""

    code: ClassVar[str] = "agent.state_lost"


class BundleError(AgentError):
    """A bundle on this device is incomplete, changed, or cannot be loaded."""

    code: ClassVar[str] = "agent.bundle"


class DamagedError(BundleError):
    """An object of a bundle is missing or changed on this disk: no fault of the bundle."""

    code: ClassVar[str] = "agent.damaged"


# --- network ---


class NetworkError(AgentError):
    """The server cannot be reached or went away: try again later."""

    code: ClassVar[str] = "agent.network"
    retryable: ClassVar[bool] = True


class TruncatedError(NetworkError):
    """An answer ended early: ask for the rest."""

    code: ClassVar[str] = "agent.truncated"


class SlowTransferError(NetworkError):
    """A transfer fell below the least rate: give it up and ask again."""

    code: ClassVar[str] = "agent.slow_transfer"


class DeadlineError(AgentError):
    """The time for the whole operation is over."""

    code: ClassVar[str] = "agent.deadline"


class ServerError(AgentError):
    """The server had a fault of its own (HTTP 5xx or 429): try again later."""

    code: ClassVar[str] = "agent.server"
    retryable: ClassVar[bool] = True


class RefusedError(AgentError):
    """The server refused the request.

    Attributes:
        status: HTTP status.
        server_code: The `code` member of the problem document, or an empty string.
    """

    code: ClassVar[str] = "agent.refused"

    def __init__(self, message: str, *, status: int, server_code: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.server_code = server_code


class UnauthorizedError(RefusedError):
    """The session token is not (or no longer) accepted: exchange the key for a new one."""

    code: ClassVar[str] = "agent.unauthorized"


class ProtocolError(AgentError):
    """The server's answer does not keep the device protocol."""

    code: ClassVar[str] = "agent.protocol"


class OversizedError(AgentError):
    """More bytes came than were announced or signed for; the transfer was cut."""

    code: ClassVar[str] = "agent.oversized"


class ContentError(AgentError):
    """The bytes are not those that were signed for; they were dropped."""

    code: ClassVar[str] = "agent.content"
    retryable: ClassVar[bool] = True


class WrongContentError(AgentError):
    """The server sent other bytes than were signed for, every time it was asked."""

    code: ClassVar[str] = "agent.wrong_content"


class PostponedError(AgentError):
    """The server wants the update later, or on another network; nothing of it was begun."""

    code: ClassVar[str] = "agent.postponed"


class MeteredError(AgentError):
    """Whole sections are needed and may not be fetched over a metered network: given up."""

    code: ClassVar[str] = "agent.metered"
    ends_as: ClassVar[UpdateState] = UpdateState.CANCELLED


class CancelledError(AgentError):
    """The server withdrew the update; nothing of it was activated."""

    code: ClassVar[str] = "agent.cancelled"
    ends_as: ClassVar[UpdateState] = UpdateState.CANCELLED


# --- trust ---


class TrustError(AgentError):
    """Update metadata cannot be trusted: nothing of it was used, the running bundle stays."""

    code: ClassVar[str] = "agent.trust"


class MetadataError(TrustError):
    """Metadata is malformed, oversized or missing."""

    code: ClassVar[str] = "agent.trust.metadata"


class SignatureRefusedError(TrustError):
    """Too few trusted keys signed."""

    code: ClassVar[str] = "agent.trust.signature"


class ExpiredError(TrustError):
    """Metadata is past its time; a server that re-signs cures it."""

    code: ClassVar[str] = "agent.trust.expired"
    retryable: ClassVar[bool] = True


class ReplayError(TrustError):
    """Metadata is older than what this device has seen."""

    code: ClassVar[str] = "agent.trust.replay"


class NonceError(TrustError):
    """The assignment does not answer the question that was asked just now."""

    code: ClassVar[str] = "agent.trust.nonce"


class WrongDeviceError(TrustError):
    """The assignment is meant for another device or another key."""

    code: ClassVar[str] = "agent.trust.device"


class DisagreementError(TrustError):
    """Director and image repository name different bytes."""

    code: ClassVar[str] = "agent.trust.disagreement"


class TargetNameError(TrustError):
    """A name in signed metadata is outside the closed grammar."""

    code: ClassVar[str] = "agent.trust.name"


class IncompatibleError(AgentError):
    """The bundle is genuine and not for this device; asking again is pointless."""

    code: ClassVar[str] = "agent.incompatible"
    ends_as: ClassVar[UpdateState] = UpdateState.REJECTED


class DeniedError(IncompatibleError):
    """The bundle failed here before: it is tried again when it expires or when somebody says so."""

    code: ClassVar[str] = "agent.denied"


class EpochError(IncompatibleError):
    """The bundle is below the security floor of this device."""

    code: ClassVar[str] = "agent.epoch"


# --- update and run time ---


class DeltaUnusableError(AgentError):
    """The delta does not make the sections it promised: they are fetched whole instead."""

    code: ClassVar[str] = "agent.delta"


class PatchProcessError(DeltaUnusableError):
    """The process that applied the delta died, hung or ran into a limit."""

    code: ClassVar[str] = "agent.patch_process"


class SelfTestFailedError(AgentError):
    """The bundle does not compute on this device what it computed at its birth."""

    code: ClassVar[str] = "agent.self_test"


class CrashLoopError(AgentError):
    """The agent was started again and again in the same step of an update."""

    code: ClassVar[str] = "agent.crash_loop"


class UnfitError(AgentError):
    """The new bundle failed its probation."""

    code: ClassVar[str] = "agent.unfit"
    ends_as: ClassVar[UpdateState] = UpdateState.ROLLED_BACK


class SupersededError(AgentError):
    """The server wants something else before the probation was over."""

    code: ClassVar[str] = "agent.superseded"
    ends_as: ClassVar[UpdateState] = UpdateState.ROLLED_BACK


class AnswerError(AgentError):
    """The plan ended with an error status while answering."""

    code: ClassVar[str] = "agent.answer"


class RequestError(AgentError):
    """What was asked for cannot be done: a word, a limit or a setting is not the model's."""

    code: ClassVar[str] = "agent.request"


class PictureError(RequestError):
    """The file or bytes given as a picture are none, or not of the size that the model takes."""

    code: ClassVar[str] = "agent.picture"


class RuntimeBusyError(AgentError):
    """The runtime was closed, or another session has its one context."""

    code: ClassVar[str] = "agent.runtime_busy"


class EvaluationSetError(AgentError):
    """The file of questions cannot be used."""

    code: ClassVar[str] = "agent.evaluation_set"
