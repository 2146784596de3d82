"""TLS and clocks: a clock that was never set does not keep a device away, a wrong one is named."""

import datetime as dt
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from device_agent.clock import SystemClock
from device_agent.config import AgentConfig
from device_agent.errors import NetworkError
from device_agent.http import CLOCK_HINT, HttpClient

YEAR = dt.timedelta(days=365)


class At(SystemClock):
    def __init__(self, year: int) -> None:
        self.year = year

    def now(self) -> dt.datetime:
        return dt.datetime(self.year, 1, 1, tzinfo=dt.UTC)


class Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_args: object) -> None:
        return


def certificate(folder: Path, name: str, start: dt.datetime) -> Path:
    """Return a file with a key and a certificate of this machine, good for a year from `start`."""
    key = Ed25519PrivateKey.generate()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address(name))])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + YEAR)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, None)
    )
    path = folder / "server.pem"
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(pem + made.public_bytes(Encoding.PEM))
    return path


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[object]:
    """Return a function that serves with such a certificate and returns the agent's settings."""
    running: list[HTTPServer] = []

    def serve(start: dt.datetime, name: str = "127.0.0.1") -> AgentConfig:
        pem = certificate(tmp_path, name, start)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        server = HTTPServer(("127.0.0.1", 0), Hello)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        running.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"https://127.0.0.1:{server.server_address[1]}"
        return AgentConfig(server_url=url, ca_file=str(pem))

    yield serve
    for server in running:
        server.shutdown()
        server.server_close()


def get(config: AgentConfig, clock: SystemClock) -> bytes:
    client = HttpClient(config, clock)
    try:
        return client.send(client.build("GET", "/", headers={}), limit_bytes=10).body
    finally:
        client.close()


NOW = dt.datetime.now(dt.UTC)


@pytest.mark.parametrize("start", [NOW + 5 * YEAR, NOW - 5 * YEAR], ids=["too early", "too late"])
def test_it_looks_at_times_of_certificates_unless_its_clock_was_never_set(serve, start) -> None:
    config = serve(start)
    with pytest.raises(NetworkError) as caught:
        get(config, SystemClock())
    assert caught.value.hint == CLOCK_HINT
    assert get(config, At(1970)) == b"ok"


def test_it_looks_at_everything_else_whatever_the_clock_says(serve, tmp_path: Path) -> None:
    other_name = serve(NOW - dt.timedelta(days=1), "127.0.0.2")
    for clock in (SystemClock(), At(1970)):
        with pytest.raises(NetworkError, match="IP address mismatch"):
            get(other_name, clock)
    unknown = AgentConfig(server_url=serve(NOW - dt.timedelta(days=1)).server_url)
    for clock in (SystemClock(), At(1970)):
        with pytest.raises(NetworkError, match="self-signed") as caught:
            get(unknown, clock)
        assert caught.value.hint == ""


def test_it_connects_with_a_good_certificate(serve) -> None:
    assert get(serve(NOW - dt.timedelta(days=1)), SystemClock()) == b"ok"
