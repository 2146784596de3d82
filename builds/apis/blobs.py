"""`PUT /blobs/{sha256}`, `GET /blobs/{sha256}`: raw bytes, streamed both ways."""

from http import HTTPStatus

from django.conf import settings
from django.http import FileResponse, HttpRequest, HttpResponse
from ninja import Router, Status

from builds.apis.schemas import BlobOut
from builds.common.auth import request_actor, require
from builds.common.errors import NotFoundError
from builds.common.roles import Permission
from builds.errors import BlobLengthRequiredError, BlobTooLargeError
from builds.models import Blob
from builds.services.blobs import blob_put
from builds.storage import blob_store
from compiler.contract.canonical import require_sha256

router = Router()
UPLOAD_HINT = "upload it with PUT /api/v1/blobs/<sha256>"
BINARY = {"type": "string", "format": "binary"}


@router.put(
    "/blobs/{sha256}",
    response={200: BlobOut, 201: BlobOut},
    operation_id="blob_put",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/octet-stream": {"schema": BINARY}},
        }
    },
)
def blob_upload(request: HttpRequest, sha256: str) -> Status[Blob]:
    """Upload the bytes whose SHA-256 is in the address; the body is the bytes themselves."""
    require_sha256(sha256, "the address")
    length = request.headers.get("Content-Length", "")
    if not length.isdecimal():
        raise BlobLengthRequiredError("send Content-Length")
    if int(length) > settings.SPARSEFLEET.max_upload_bytes:
        raise BlobTooLargeError(
            f"{length} bytes, the limit is {settings.SPARSEFLEET.max_upload_bytes}"
        )
    blob, created = blob_put(actor=request_actor(request), sha256=sha256, stream=request)
    return Status(HTTPStatus.CREATED if created else HTTPStatus.OK, blob)


@router.api_operation(
    ["GET", "HEAD"], "/blobs/{sha256}", response={200: None}, operation_id="blob_get"
)
def blob_download(request: HttpRequest, sha256: str) -> HttpResponse | FileResponse:
    """Return the bytes; HEAD tells whether they are there, in full."""
    require(request_actor(request), Permission.SUBMIT)
    require_sha256(sha256, "the address")
    blob = Blob.objects.filter(pk=sha256).first()
    if blob is None:
        raise NotFoundError(f"no blob {sha256}", hint=UPLOAD_HINT)
    store = blob_store()
    if store.size(sha256) != blob.size_bytes:
        raise NotFoundError(f"blob {sha256} is damaged on the server", hint=UPLOAD_HINT)
    headers = {"ETag": f'"{sha256}"', "Content-Length": str(blob.size_bytes)}
    if request.method == "HEAD":
        return HttpResponse(headers=headers, content_type="application/octet-stream")
    return FileResponse(
        store.open(sha256), headers=headers, content_type="application/octet-stream"
    )
