"""A child that speaks the runner's protocol and compiles nothing: the submission says what it does.

The first word of `model.onnx` is the script: `ok`, `user`, `app`, `retry`, `crash`, `kill`, `hang`,
`silent`, `noise`, `flip`, `other`, `empty`. Output is a function of submission and base alone.
"""

import hashlib
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

from builds.compile_runner import child
from builds.compile_runner.protocol import EXIT_REPORTED, Failure, Progress, encode
from compiler.contract.manifest import ReleaseManifest, Requirements, Section, parse_manifest

SCRIPTS = frozenset(
    {"ok", "user", "app", "retry", "crash", "kill", "hang"}
    | {"silent", "noise", "flip", "other", "empty"}
)


def say(event: object) -> None:
    print(encode(event), flush=True)  # type: ignore[arg-type]


def sections_of(job: dict[str, object], script: bytes) -> dict[str, bytes]:
    base = b""
    if job["base"]:
        base = parse_manifest((Path(str(job["base"])) / "manifest.json").read_bytes()).to_bytes()
    seed = hashlib.sha256(script + base).digest()
    return {
        "plan": b"plan" + seed,
        "kernels": f"code for {job['target']}".encode(),
        "weights.shared": seed * 64,
    }


def write(job: dict[str, object], script: bytes) -> None:
    out = Path(str(job["out"]))
    (out / "sections").mkdir(parents=True)
    sections = sections_of(job, script)
    rows = []
    for name, data in sorted(sections.items()):
        (out / "sections" / name).write_bytes(data)
        rows.append(Section(name, len(data), hashlib.sha256(data).hexdigest()))
    manifest = ReleaseManifest(
        model=str(job["model"]),
        version="other" if script.startswith(b"other") else str(job["version"]),
        release_seq=int(str(job["release_seq"])),
        security_epoch=int(str(job["security_epoch"])),
        target=str(job["target"]),
        plan_abi=1,
        requires=Requirements(ram_bytes=1, free_bytes=1),
        verified_on="host",
        sections=tuple(rows),
        provenance_sha256="0" * 64,
    )
    if script.startswith(b"flip"):
        (out / "sections" / "plan").write_bytes(sections["plan"][:-1] + b"!")
    (out / "report.json").write_text(json.dumps({"kind": "simulated"}))
    (out / "ir.mlir").write_text("module {}")
    (out / "manifest.json").write_bytes(manifest.to_bytes())


def main() -> int:
    job = json.load(sys.stdin)
    script = (Path(job["submission"]) / "model.onnx").read_bytes()
    word = script.split()[0].decode("ascii", "replace")
    if word not in SCRIPTS:  # a real model: the real compiler
        return child.main(io.StringIO(json.dumps(job)), sys.stdout)
    say(Progress("import", 0.1))
    if word == "user":
        hint = "supported: Add, Mul"
        say(Failure("build.user.unsupported_op", "node n1: Foo has no kernel", hint, False))
        return EXIT_REPORTED
    say(Progress("quantise", 0.5))
    if word in {"app", "retry"}:
        say(Failure("build.app.toolchain", "cc crashed", "", word == "retry"))
        return EXIT_REPORTED
    if job["do"] == "check":
        return 0
    if word == "noise":
        print('{"event": "progress"}\n{}\nnull\n"x"\n' + "y" * 100_000, flush=True)
        sys.stdout.buffer.write(b"\xff\xfe\x00binary\n")
        sys.stdout.flush()
    if word == "hang":
        flag = Path(job["cache"]).parent / "hanging"
        if not flag.exists():  # only the first run hangs: a rerun finishes
            flag.write_text(str(os.getpid()))
            time.sleep(600)
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "crash":
        raise RuntimeError("the child fell over")
    if word == "silent":
        return EXIT_REPORTED
    if word != "empty":
        write(job, script)
    return 0


if __name__ == "__main__":
    sys.exit(main())
