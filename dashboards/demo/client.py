"""The REST client of the demo's CI job and release manager: plain HTTP and an API token."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx

from dashboards.demo.errors import DemoError

Document = Mapping[str, Any]
HTTP_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.5
T = TypeVar("T")


class ApiClient:
    """Calls `/api/v1/` with a bearer token; a problem document becomes a `DemoError`."""

    def __init__(self, base_url: str, token: str) -> None:
        self._http = httpx.Client(
            base_url=f"{base_url}/api/v1",
            headers={"Authorization": f"Bearer {token}"},
            timeout=HTTP_TIMEOUT_S,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def get(self, path: str, **query: str | int) -> Document:
        """Return the JSON answer of a GET."""
        return self._answer(self._http.get(path, params=query))

    def post(self, path: str, body: Document | None = None, *, key: str = "") -> Document:
        """Return the JSON answer of a POST, sent with an idempotency key when one is given."""
        headers = {"Idempotency-Key": key} if key else {}
        return self._answer(self._http.post(path, json=dict(body or {}), headers=headers))

    def upload(self, file: Path) -> Document:
        """Upload one file by digest and return its entry for a submission."""
        data = file.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        self._answer(self._http.put(f"/blobs/{digest}", content=data))
        return {"name": file.name, "sha256": digest, "size_bytes": len(data)}

    def submit(
        self, model: str, version: str, folder: Path, *, base: str | None = None
    ) -> Document:
        """Submit a model version from a folder, as CI does; sending it again is harmless."""
        files = [self.upload(path) for path in sorted(folder.iterdir()) if path.is_file()]
        claim = json.loads((folder / "claim.json").read_text(encoding="utf-8"))
        body = {
            "version": version,
            "base_version": base,
            "files": files,
            "claim": claim,
            "notes": "",
        }
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        first: Document = self.post(f"/models/{model}/versions", body, key=key)
        again: Document = self.post(f"/models/{model}/versions", body, key=key)
        if first["version"] != again["version"] or first.get("id") != again.get("id"):
            raise DemoError("a repeated submission made a second version")
        return first

    @staticmethod
    def _answer(response: httpx.Response) -> Document:
        if response.is_success:
            document: Document = response.json() if response.content else {}
            return document
        try:
            problem = response.json()
        except ValueError:
            problem = {"detail": response.text[:500]}
        raise DemoError(
            f"{response.request.method} {response.request.url.path}: {response.status_code} "
            f"{problem.get('code', '')} {problem.get('detail') or problem.get('title', '')}",
            hint=str(problem.get("hint", "")),
        )


def wait_for(
    look: Callable[[], T | None], *, what: str, timeout_s: float, watch: Callable[[], None]
) -> T:
    """Call `look` until it returns something.

    Args:
        look: Returns None while the thing has not happened yet.
        what: Named in the error.
        timeout_s: When to give up, seconds.
        watch: Called between looks; raises when a process of the demo has died.

    Raises:
        DemoError: It did not happen in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        result = look()
        if result is not None:
            return result
        if time.monotonic() > deadline:
            raise DemoError(f"{what}: nothing after {timeout_s:.0f} s")
        watch()
        time.sleep(POLL_S)
