"""The only place on the server that reads the environment: every setting, typed, with a default.

The defaults are the embedded form (SQLite, local folders, file-based queue, generated keys).
Production is the same code with `SPARSEFLEET_DATABASE_URL`, `SPARSEFLEET_BROKER_URL` and
friends set. A secret may also come from a file: set `<NAME>_FILE`.
"""

import os
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

ROOT = Path(__file__).resolve().parents[2]


def _default_state_dir() -> Path:
    return ROOT / "var"


class Environment(BaseSettings):
    """Settings of the web platform and its workers, read from `SPARSEFLEET_*`."""

    model_config = SettingsConfigDict(env_prefix="SPARSEFLEET_", extra="ignore")

    debug: bool = Field(False, description="Development only: stack traces in pages.")
    state_dir: Path = Field(
        default_factory=_default_state_dir,
        description="Database, blobs, keys and caches of the embedded form.",
    )
    secret_key: str = Field(
        "", description="Django's secret; made and kept in state_dir when empty."
    )
    allowed_hosts: str = Field(
        "127.0.0.1,localhost,[::1]", description="Comma separated host names."
    )
    csrf_trusted_origins: str = Field("", description="Comma separated origins, with scheme.")
    database_url: str = Field(
        "", description="For example postgres://user:pw@host/db; SQLite when empty."
    )
    broker_url: str = Field(
        "", description="For example redis://host/0; a folder in state_dir when empty."
    )
    signing_keys: str = Field(
        "", description="Folder of keys.json, online keys; state_dir/keys when empty."
    )
    offline_keys: str = Field(
        "",
        description="Folder of offline keys, for development and the demo alone;"
        " state_dir/keys-offline when empty.",
    )
    demo_keys: bool = Field(
        False,
        description="Let online roles sign with plain files although debug is off, as the demo"
        " does; never with a database server.",
    )
    release_approval: Literal["operator", "automatic"] = Field(
        "operator",
        description="Whether a person approves each bundle before it is signed and offered.",
    )
    pkcs11_library: str = Field(
        "", description="PKCS#11 library of the token that hsm: keys are in."
    )
    pkcs11_pin: str = Field("", description="PIN of that token.")
    blob_dir: str = Field(
        "", description="Folder of content-addressed blobs; state_dir/blobs when empty."
    )
    max_upload_bytes: int = Field(4 << 30, description="Largest file that CI may upload, bytes.")
    poll_after_s: float = Field(
        300.0, gt=0, description="How long a device waits between polls, seconds."
    )
    snapshot_max_age_s: float = Field(
        0.5, gt=0, description="How often the poll path looks for changes, seconds."
    )
    tick_s: float = Field(
        2.0, gt=0, description="How often the worker re-drives everything, seconds."
    )
    build_lease_s: float = Field(
        120.0, gt=0, description="A build whose worker is silent this long is retried, seconds."
    )
    build_attempts: int = Field(
        3, ge=1, description="Runs of a build that fails through our fault before it is given up."
    )
    build_backoff_s: float = Field(
        5.0, ge=0, description="Wait after the first failed run, seconds; later waits are longer."
    )
    build_time_limit_s: float = Field(
        1_800.0, gt=0, description="A compiler that runs longer is stopped, seconds."
    )
    compile_command: str = Field(
        "", description="Command of the compiler; this interpreter with `-m compiler` when empty."
    )
    doorbell_patience_s: float = Field(
        15.0, gt=0, description="After this long without a taker the queue is told again, seconds."
    )
    delta_max_ratio: float = Field(
        0.4, gt=0, le=1, description="A delta above this share of the full download is not offered."
    )
    delta_queue_limit: int = Field(
        256, ge=1, description="Deltas that may wait or be built; more wait outside the queue."
    )
    metadata_bin_bits: int = Field(
        4, ge=1, le=14, description="Release manifests are spread over 2^bits metadata files."
    )
    session_token_s: int = Field(
        3_600, gt=0, description="Life of a device's session token, seconds."
    )
    time_nonces_per_minute: float = Field(
        60.0, ge=1, description="How often one address may ask for the time and a nonce."
    )
    probation_s: float = Field(
        30.0, ge=0, description="How long a new bundle runs before it is committed, seconds."
    )
    content_kek: str = Field(
        "",
        description="64 hexadecimal digits that encrypt the keys of confidential releases; "
        "a file beside the signing keys when empty.",
    )
    trusted_proxies: str = Field(
        "",
        description="Comma separated addresses or networks of proxies: what their headers "
        "Client-Cert, X-Forwarded-For and X-Forwarded-Proto say is believed.",
    )
    device_mtls: Literal["off", "required"] = Field(
        "off", description="required: devices must come through a trusted proxy with a certificate."
    )
    confirm_s: float = Field(
        86_400.0,
        ge=0,
        description="A device that has not committed so long after the offer says so; 0 = never.",
    )
    secure_cookies: bool = Field(False, description="Set behind TLS.")

    @model_validator(mode="before")
    @classmethod
    def _secrets_from_files(cls, values: dict[str, object]) -> dict[str, object]:
        for name in ("secret_key", "database_url", "broker_url", "pkcs11_pin", "content_kek"):
            path = os.environ.get(f"SPARSEFLEET_{name.upper()}_FILE")
            if path and not values.get(name):
                values[name] = Path(path).read_text(encoding="utf-8").strip()
        return values

    @model_validator(mode="after")
    def _resolve(self) -> Self:
        self.state_dir = self.state_dir.expanduser().resolve()
        networks = self.proxy_networks
        if self.device_mtls == "required" and not networks:
            raise ValueError("device_mtls=required needs trusted_proxies: nobody else verifies")
        return self

    @property
    def proxy_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Return the networks of the proxies in front.

        Raises:
            ValueError: One is no address or network.
        """
        names = [item.strip() for item in self.trusted_proxies.split(",") if item.strip()]
        return tuple(ip_network(name) for name in names)

    @property
    def blob_path(self) -> Path:
        """Return the folder of content-addressed blobs."""
        return Path(self.blob_dir) if self.blob_dir else self.state_dir / "blobs"

    @property
    def key_path(self) -> Path:
        """Return the folder of online signing keys."""
        return Path(self.signing_keys) if self.signing_keys else self.state_dir / "keys"

    @property
    def offline_key_path(self) -> Path:
        """Return the folder of offline keys: a folder a holder."""
        return Path(self.offline_keys) if self.offline_keys else self.state_dir / "keys-offline"

    @property
    def allows_file_keys(self) -> bool:
        """Return whether online roles may sign with plain files."""
        return self.debug or (self.demo_keys and not self.database_url)

    def pin(self, _secret: str) -> str:
        """Return the PIN of the PKCS#11 token.

        Raises:
            ValueError: None is set.
        """
        if not self.pkcs11_pin:
            raise ValueError("set SPARSEFLEET_PKCS11_PIN_FILE")
        return self.pkcs11_pin


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Return the settings of this process, read once."""
    found = Environment()
    if found.pkcs11_library:
        # Where securesystemslib looks for it.
        os.environ["PYKCS11LIB"] = found.pkcs11_library
    return found


def child_environment(**overrides: str) -> dict[str, str]:
    """Return the environment for a child process: this one's, with `overrides` on top."""
    return {**os.environ, **overrides}
