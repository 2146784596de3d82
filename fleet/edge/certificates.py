"""What a proxy in front says about a client: believed from a trusted proxy, dropped from others.

    device -(mTLS)-> proxy -(`Client-Cert`, RFC 9440)-> here        peer in `trusted_proxies`
    anybody -(the same header)-> here                               the header is taken away

Client certificates are an option on top: whoever shows one still signs with the device key, so a
mistake at the proxy opens nothing. `device_mtls` = `required` refuses requests to the device API
that did not come through a trusted proxy with a certificate which that has verified.
"""

import ipaddress
from collections.abc import Iterable
from typing import Any, Final

from django.conf import settings

from compiler.contract.protocol import DEVICE_PREFIX
from fleet.edge.wire import StartResponse, WsgiApp, problem
from fleet.errors import ClientCertificateError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
CERTIFICATE: Final = "HTTP_CLIENT_CERT"
FORWARDED_FOR: Final = "HTTP_X_FORWARDED_FOR"
FORWARDED_PROTO: Final = "HTTP_X_FORWARDED_PROTO"
# Names that proxies use; a server makes the same key of `Client-Cert` and `Client_Cert`.
CERTIFICATE_PREFIXES: Final = (
    "HTTP_CLIENT_CERT",
    "HTTP_X_CLIENT_CERT",
    "HTTP_X_CLIENT_VERIFY",
    "HTTP_X_FORWARDED_CLIENT_CERT",
    "HTTP_X_FORWARDED_TLS_CLIENT_CERT",
    "HTTP_X_SSL_CERT",
    "HTTP_X_SSL_CLIENT",
    "HTTP_SSL_CLIENT",
)


class CertificateGate:
    """Stands in front of every other part of the platform."""

    def __init__(self, behind: WsgiApp, networks: Iterable[Network], *, is_required: bool) -> None:
        """Believe peers inside `networks`; `is_required`: devices must show a certificate."""
        self._behind = behind
        self._networks = tuple(networks)
        self._is_required = is_required

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        if self._is_trusted(environ.get("REMOTE_ADDR", "")):
            environ["REMOTE_ADDR"] = self._client(environ)
            scheme = environ.get(FORWARDED_PROTO, "")
            if scheme in ("http", "https"):
                environ["wsgi.url_scheme"] = scheme  # signatures cover the address as it was asked
        else:
            for name in [name for name in environ if name.startswith(CERTIFICATE_PREFIXES)]:
                del environ[name]
        is_device = environ.get("PATH_INFO", "").startswith(DEVICE_PREFIX)
        if self._is_required and is_device and not environ.get(CERTIFICATE):
            return problem(
                start_response,
                ClientCertificateError(
                    "a client certificate is needed here",
                    hint="connect through the proxy with the device's certificate",
                ),
            )
        return self._behind(environ, start_response)

    def _is_trusted(self, address: str) -> bool:
        if not self._networks:
            return False
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self._networks)

    def _client(self, environ: dict[str, Any]) -> str:
        """Return who the proxies say is asking: the last address that is none of theirs."""
        peer: str = environ["REMOTE_ADDR"]
        for address in reversed(environ.get(FORWARDED_FOR, "").split(",")):
            if not self._is_trusted(peer) or not address.strip():
                break
            peer = address.strip()
        return peer


def guarded(behind: WsgiApp) -> CertificateGate:
    """Return the platform's WSGI application behind the gate, as the settings say."""
    environment = settings.SPARSEFLEET
    return CertificateGate(
        behind,
        environment.proxy_networks,
        is_required=environment.device_mtls == "required",
    )
