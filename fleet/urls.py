"""The device API under `/d/v1/`. `poll` and `blobs` are answered before, by `fleet.edge`."""

from django.urls import path

from fleet.apis import device

urlpatterns = [
    path("enrol", device.enrol, name="device-enrol"),
    path("token", device.token, name="device-token"),
    path("time-nonce", device.time_and_nonce, name="device-time"),
    path("rotate-key", device.rotate_key, name="device-key"),
    path("poll", device.poll, name="device-poll"),
    path("updates/<int:update_id>/assignment", device.assignment, name="update-assignment"),
    path("updates/<int:update_id>/report", device.report, name="update-report"),
    path("rules", device.rules, name="device-rules"),
    path("telemetry", device.telemetry, name="device-telemetry"),
]
