"""The hot paths of the device API, answered before Django sees them.

    GET /d/v1/poll                      token checked by HMAC, answer from a snapshot, no SQL
    GET /d/v1/blobs/<sha256>?update=    the same check, then a file, cut off when withdrawn

`wrap(django_application)` is the WSGI application of the platform. One snapshot per process holds
every answer that is not "nothing to do"; it is never older than `snapshot_max_age_s`, so no device
gets an offer, and no download goes on, later than that after a halt was committed. Heartbeats are
collected and written once a second. `fleet.selectors.poll` says the same slowly and is the
reference.
"""

from fleet.edge.app import wrap
from fleet.edge.certificates import guarded

__all__ = ["guarded", "wrap"]
