"""Headers about client certificates count when a trusted proxy sends them, and from nobody else."""

import json
from ipaddress import ip_network
from typing import Any

import pytest
from pydantic import ValidationError

from dashboards.conf.env import Environment
from dashboards.conf.wsgi import application
from fleet.edge.certificates import CertificateGate

PROXY = (ip_network("10.1.0.0/16"), ip_network("fd00::/8"))
FORGED = (
    "HTTP_CLIENT_CERT",
    "HTTP_CLIENT_CERT_CHAIN",
    "HTTP_X_CLIENT_CERT_DN",
    "HTTP_X_FORWARDED_CLIENT_CERT",
    "HTTP_X_SSL_CLIENT_VERIFY",
    "HTTP_X_SSL_CERT",
    "HTTP_SSL_CLIENT_S_DN",
)


class Behind:
    """The platform, as the gate sees it."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.seen = dict(environ)
        start_response("200 OK", [])
        return [b"{}"]


def ask(
    peer: str, path: str = "/d/v1/poll", *, networks: Any = PROXY, required: bool = False, **headers
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return status, what the platform saw, and the body."""
    behind, status = Behind(), []
    gate = CertificateGate(behind, networks, is_required=required)
    environ = {"REMOTE_ADDR": peer, "PATH_INFO": path, "REQUEST_METHOD": "GET", **headers}
    body = b"".join(gate(environ, lambda line, _headers: status.append(int(line.split()[0]))))
    return status[0], behind.seen, json.loads(body)


@pytest.mark.parametrize("peer", ["203.0.113.9", "10.2.0.1", "::1", "", "unix:", "10.1.0.1.evil"])
@pytest.mark.parametrize("networks", [PROXY, ()])
def test_it_takes_the_headers_of_strangers_away(peer, networks):
    forged = dict.fromkeys(FORGED, ":AAAA:")
    status, seen, _ = ask(peer, networks=networks, HTTP_ACCEPT="x", **forged)
    assert status == 200
    assert not [name for name in seen if "CERT" in name or "SSL" in name]
    assert seen["HTTP_ACCEPT"] == "x"


@pytest.mark.parametrize("peer", ["10.1.2.3", "fd00::7"])
def test_it_passes_on_what_a_trusted_proxy_says(peer):
    status, seen, _ = ask(peer, HTTP_CLIENT_CERT=":AAAA:", required=True)
    assert (status, seen["HTTP_CLIENT_CERT"]) == (200, ":AAAA:")


@pytest.mark.parametrize(
    ("peer", "headers"),
    [
        ("203.0.113.9", {"HTTP_CLIENT_CERT": ":AAAA:"}),
        ("10.1.2.3", {}),
        ("10.1.2.3", {"HTTP_CLIENT_CERT": ""}),
        ("10.1.2.3", {"HTTP_X_CLIENT_CERT": ":AAAA:"}),
    ],
)
def test_it_lets_no_device_in_without_a_certificate_where_one_is_required(peer, headers):
    status, seen, problem = ask(peer, required=True, **headers)
    assert (status, problem["code"], seen) == (403, "fleet.client_certificate", {})


def test_it_asks_people_for_no_certificate():
    assert ask("203.0.113.9", "/api/v1/devices", required=True)[0] == 200


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("203.0.113.9", "198.51.100.1", "203.0.113.9"),
        ("10.1.2.3", "198.51.100.1", "198.51.100.1"),
        ("10.1.2.3", "6.6.6.6, 198.51.100.1, 10.1.9.9", "198.51.100.1"),
        ("10.1.2.3", "", "10.1.2.3"),
    ],
)
def test_it_knows_who_asks_through_a_proxy(peer, forwarded, client):
    assert ask(peer, HTTP_X_FORWARDED_FOR=forwarded)[1]["REMOTE_ADDR"] == client


@pytest.mark.parametrize(
    ("peer", "said", "scheme"),
    [
        ("10.1.2.3", "https", "https"),
        ("10.1.2.3", "gopher", "http"),
        ("10.1.2.3", "", "http"),
        ("203.0.113.9", "https", "http"),
    ],
)
def test_it_knows_the_address_that_was_asked_behind_a_proxy(peer, said, scheme):
    seen = ask(peer, HTTP_X_FORWARDED_PROTO=said, **{"wsgi.url_scheme": "http"})[1]
    assert seen["wsgi.url_scheme"] == scheme


def test_it_refuses_settings_that_would_shut_everybody_out(tmp_path):
    for wrong in ({"device_mtls": "required"}, {"trusted_proxies": "the proxy"}):
        with pytest.raises(ValidationError):
            Environment(state_dir=tmp_path, **wrong)
    good = Environment(
        state_dir=tmp_path, device_mtls="required", trusted_proxies="10.1.0.0/16, 192.0.2.7"
    )
    assert [str(network) for network in good.proxy_networks] == ["10.1.0.0/16", "192.0.2.7/32"]


def test_it_stands_in_front_of_the_platform():
    assert isinstance(application, CertificateGate)
