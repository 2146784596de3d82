"""The port to private keys: from an address to something that signs, and one kind of error.

    file2:NAME            a PEM file beside `keys.json`; for development and the demo
    hsm:ID?label=TOKEN    an ECDSA P-256 key in a PKCS#11 token: SoftHSM, YubiHSM, smart cards
    awskms: gcpkms: azurekms: hv:   as securesystemslib reads them; its extra packages are needed

Keys, ring, publisher and commands know addresses only, so development and production differ by
`keys.json`. Called by `builds.keys`. Refuses a private half that is not of the listed public one.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Final, Self

from securesystemslib.signer import HSMSigner, Key, Signature, Signer

from builds.errors import SigningKeysError

FILE_SCHEME: Final = "file2:"
HSM_SCHEME: Final = "hsm:"
PROBE: Final = b"sparsefleet: do these halves belong together?"
PinHandler = Callable[[str], str]

# A PKCS#11 library keeps one log-in state per process: two threads would log each other out.
_TOKEN_LOCK: Final = Lock()


def no_pin(secret: str) -> str:
    """Refuse to say a PIN: this caller has none.

    Raises:
        SigningKeysError: Always.
    """
    raise SigningKeysError(
        f"the {secret} of the token is not known here",
        hint="set SPARSEFLEET_PKCS11_PIN_FILE",
    )


class PortSigner(Signer):
    """A signer of any kind whose every fault is a `SigningKeysError`; tokens take turns."""

    def __init__(self, inner: Signer, uri: str) -> None:
        self._inner = inner
        self._uri = uri

    @classmethod
    def from_priv_key_uri(
        cls,
        priv_key_uri: str,
        public_key: Key,
        secrets_handler: PinHandler | None = None,
    ) -> Self:
        """Return the signer of an address; securesystemslib knows the kinds."""
        return cls(
            Signer.from_priv_key_uri(priv_key_uri, public_key, secrets_handler), priv_key_uri
        )

    @property
    def public_key(self) -> Key:
        """Return the public half."""
        return self._inner.public_key

    def sign(self, payload: bytes) -> Signature:
        """Return a signature.

        Raises:
            SigningKeysError: The file, token or service failed; it may succeed later.
        """
        try:
            if not self._uri.startswith(HSM_SCHEME):
                return self._inner.sign(payload)
            with _TOKEN_LOCK:
                return self._inner.sign(payload)
        except SigningKeysError:
            raise
        except Exception as error:  # each service has errors of its own, none of them documented
            raise SigningKeysError(
                f"the signer {self._uri} failed: {type(error).__name__} {error}",
                hint="is the token or the key service there, and its PIN right?",
            ) from error


def load_signer(uri: str, public: Key, folder: Path, pin: PinHandler = no_pin) -> Signer:
    """Return the signer of an address.

    Args:
        uri: The address; that of a file is relative to `folder`.
        public: Its public half.
        folder: Where files are.
        pin: Says the PIN of a token.

    Raises:
        SigningKeysError: It is missing, unreadable, or of another public half.
    """
    full = uri
    if uri.startswith(FILE_SCHEME):
        full = f"{FILE_SCHEME}{folder / uri.removeprefix(FILE_SCHEME)}"
    try:
        return PortSigner.from_priv_key_uri(full, public, pin)
    except Exception as error:  # as above
        raise SigningKeysError(f"cannot load the key {uri}: {error}") from error


def require_pair(signer: Signer) -> None:
    """Sign something meaningless, so that a key which cannot sign is known before it is needed.

    Raises:
        SigningKeysError: It cannot, or with another key than the public half says.
    """
    signature = signer.sign(PROBE)
    try:
        signer.public_key.verify_signature(signature, PROBE)
    except Exception as error:
        raise SigningKeysError("the private half belongs to another key") from error


def token_import(uri: str, pin: PinHandler) -> Key:
    """Return the public half of a key in a token.

    Raises:
        SigningKeysError: No such token or key, or the PKCS#11 library cannot be used.
    """
    number, label = _token_address(uri)
    try:
        with _TOKEN_LOCK:
            _, public = HSMSigner.import_(number, label, pin)
    except Exception as error:
        raise SigningKeysError(f"{uri}: {type(error).__name__} {error}") from error
    return public


def token_generate(uri: str, library: str, pin: PinHandler) -> Key:
    """Make an ECDSA P-256 key in a token, which it never leaves; return its public half.

    Raises:
        SigningKeysError: The token has a key of this number, or cannot be used.
    """
    number, label = _token_address(uri)
    try:
        import pkcs11
        from pkcs11.util.ec import encode_named_curve_parameters

        with _TOKEN_LOCK:
            token = pkcs11.lib(library).get_token(token_label=label)
            with token.open(rw=True, user_pin=pin("pin")) as session:
                _require_free(session, {pkcs11.Attribute.ID: bytes([number])}, uri)
                curve = {pkcs11.Attribute.EC_PARAMS: encode_named_curve_parameters("secp256r1")}
                parameters = session.create_domain_parameters(pkcs11.KeyType.EC, curve, local=True)
                parameters.generate_keypair(store=True, id=bytes([number]), label=f"key {number}")
    except SigningKeysError:
        raise
    except Exception as error:
        raise SigningKeysError(f"{uri}: {type(error).__name__} {error}") from error
    return token_import(uri, pin)


def _require_free(session: Any, where: Mapping[Any, Any], uri: str) -> None:  # noqa: ANN401 -- of pkcs11
    if any(True for _ in session.get_objects(where)):
        raise SigningKeysError(f"{uri} exists: keys are never overwritten")


def _token_address(uri: str) -> tuple[int, str]:
    from urllib.parse import parse_qs, urlsplit

    parts = urlsplit(uri)
    label = parse_qs(parts.query).get("label", [""])[0]
    if parts.scheme != HSM_SCHEME[:-1] or not parts.path.isdecimal() or not label:
        raise SigningKeysError(
            f"{uri!r} names no key in a token", hint="for example hsm:3?label=sparsefleet"
        )
    number = int(parts.path)
    if not 1 <= number <= 255:
        raise SigningKeysError(f"{uri!r}: the number of a key is 1 to 255")
    return number, label
