r"""A CI job: submit a directory as a model version over REST, and wait until it is compiled.

    python -m examples.ci.submit http://127.0.0.1:8000 build/submission --model doc-reader \
        --version 1.4.0 --token-file ci.token

Standard library only, so that a pipeline can copy the file. Sending the same version again is
harmless: uploads go by digest, and a version that exists with the same content is answered as it
is. Progress goes to standard error, the builds as JSON to standard output.

Exit status: 0 compiled for every active target, 1 refused or failed, 2 wrong arguments.
"""

import argparse
import hashlib
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

FINAL_STATES: Final = frozenset({"ready", "failed_user", "failed_app"})
POLL_S: Final = 1.0
HTTP_TIMEOUT_S: Final = 60.0


class RefusedError(Exception):
    """The platform said no; `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Platform:
    """The management API: JSON in, JSON out, a problem document becomes a `RefusedError`."""

    def __init__(self, address: str, token: str) -> None:
        self._root = f"{address.rstrip('/')}/api/v1"
        self._token = token

    def call(self, method: str, path: str, body: object = None, *, raw: bytes | None = None) -> Any:  # noqa: ANN401 -- JSON
        """Send one request and return its JSON answer."""
        data = json.dumps(body).encode() if body is not None else raw
        kind = "application/json" if raw is None else "application/octet-stream"
        request = urllib.request.Request(  # noqa: S310 -- the address is the caller's
            self._root + path,
            data=data,
            method=method,
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": kind},
        )
        try:
            with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise _refusal(error) from error
        except OSError as error:
            raise RefusedError(f"{self._root} cannot be reached: {error}") from error

    def upload(self, file: Path) -> dict[str, object]:
        """Upload a file by its digest; return its entry for a submission."""
        data = file.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        self.call("PUT", f"/blobs/{digest}", raw=data)
        return {"name": file.name, "sha256": digest, "size_bytes": len(data)}


def submit(
    platform: Platform,
    folder: Path,
    *,
    model: str,
    version: str,
    base: str | None = None,
    constant_time: bool = False,
) -> Mapping[str, Any]:
    """Make the model if it is new, upload the files, submit the version; return the version."""
    claim = folder / "claim.json"
    platform.call("POST", "/models", {"name": model})
    answer: Mapping[str, Any] = platform.call(
        "POST",
        f"/models/{model}/versions",
        {
            "version": version,
            "base_version": base,
            "constant_time": constant_time,
            "files": [platform.upload(path) for path in sorted(folder.iterdir()) if path.is_file()],
            "claim": json.loads(claim.read_text(encoding="utf-8")) if claim.exists() else {},
        },
    )
    return answer


def wait(platform: Platform, model: str, version: str, timeout_s: float) -> list[Any]:
    """Return the builds of a version once each has ended, or what there is after `timeout_s`."""
    said: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        builds = platform.call("GET", f"/builds?model={model}&version={version}&limit=100")["items"]
        for build in builds:
            if said.get(build["id"]) != build["state"]:
                said[build["id"]] = build["state"]
                _say(f"build {build['id']} for {build['target']}: {build['state']}")
        if all(build["state"] in FINAL_STATES for build in builds) or time.monotonic() > deadline:
            return list(builds)
        time.sleep(POLL_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Submit, wait, report; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        token = options.token_file.read_text(encoding="utf-8").split()[0]
        platform = Platform(options.address, token)
        made = submit(
            platform,
            options.folder,
            model=options.model,
            version=options.version,
            base=options.base,
            constant_time=options.constant_time,
        )
        _say(f"{made['model']} {made['version']}: {made['state']}, {len(made['builds'])} builds")
        builds = wait(platform, options.model, options.version, options.timeout)
    except RefusedError as error:
        _say(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""))
        return 1
    except (OSError, IndexError) as error:
        _say(f"error: {error}")
        return 2
    for build in builds:
        if build["error"]:
            error = build["error"]
            _say(f"error: {build['target']}: {error['message']}\nhint: {error['hint']}")
    open_ones = sum(build["state"] not in FINAL_STATES for build in builds)
    if open_ones:
        _say(f"error: {open_ones} builds have not ended; send the same line again to wait on")
    sys.stdout.write(json.dumps([_short(build) for build in builds], indent=1) + "\n")
    return 0 if all(build["state"] == "ready" for build in builds) else 1


def _short(build: Mapping[str, Any]) -> dict[str, Any]:
    return {name: build[name] for name in ("id", "target", "state", "manifest_sha256")}


def _refusal(error: urllib.error.HTTPError) -> RefusedError:
    try:
        problem = json.load(error)
        return RefusedError(f"{problem['detail']} ({problem['code']})", problem.get("hint", ""))
    except (ValueError, KeyError):
        return RefusedError(f"status {error.code} of {error.url}")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.ci.submit", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("address", help="of the platform, such as https://fleet.example")
    parser.add_argument("folder", type=Path, help="submission directory with pipeline.json")
    parser.add_argument("--model", required=True, help="made if there is none of this name")
    parser.add_argument("--version", required=True, help="name of the version, final once sent")
    parser.add_argument("--base", help="older version whose grids are kept: smaller updates")
    parser.add_argument(
        "--constant-time", action="store_true", help="let no value decide time or accesses"
    )
    parser.add_argument("--token-file", type=Path, required=True, help="holds the API token")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds (default: 3600)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
