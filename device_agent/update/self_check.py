"""Prove at every start that this agent refuses what it must refuse.

A build whose signature check was compiled out, or a library that broke, accepts everything and
looks healthy. So an assignment signed by a stranger is shown to the verifier before the first poll.
"""

from datetime import UTC, datetime, timedelta
from typing import Final

from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, Root, TargetFile, Targets

from compiler.contract.protocol import Assignment, OfferKind
from device_agent.errors import SignatureRefusedError, TrustError
from device_agent.update.director import Expected, verify_assignment

_DEVICE: Final = "0" * 32
_THUMBPRINT: Final = "0" * 64
_NONCE: Final = "0" * 32
_PATH: Final = "releases/self-check/1-none.json"


def require_working_verifier() -> None:
    """Show the verifier a good and a forged assignment.

    Raises:
        TrustError: It took the forged one, or refused the good one: this agent must not run.
    """
    expires = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    owner, stranger = CryptoSigner.generate_ed25519(), CryptoSigner.generate_ed25519()
    root = Metadata(Root(expires=expires))
    for role in ("root", "targets", "snapshot", "timestamp"):
        root.signed.add_key(owner.public_key, role)
    root.sign(owner)
    expected = Expected(_DEVICE, _THUMBPRINT, _NONCE, datetime.now(UTC))

    def show(signer: CryptoSigner) -> None:
        document = Metadata(Targets(expires=expires, targets={_PATH: _target()}))
        document.sign(signer)
        verify_assignment(document.to_bytes(), root.to_bytes(), lambda _version: None, expected)

    try:
        show(owner)
    except TrustError as error:
        raise TrustError(f"the verifier refuses what is properly signed: {error}") from error
    try:
        show(stranger)
    except SignatureRefusedError:
        return
    raise TrustError(
        "the verifier accepts a forged signature", hint="this installation is broken: replace it"
    )


def _target() -> TargetFile:
    assignment = Assignment(_DEVICE, _THUMBPRINT, 1, _NONCE, OfferKind.INSTALL, 0, None)
    custom = {"custom": assignment.to_json()}
    return TargetFile(1, {"sha256": "0" * 64}, _PATH, custom)
