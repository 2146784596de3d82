"""Counters of answers, shared by every table that adds them up."""

from django.db import models


class AnswerCounts(models.Model):
    """Sums over telemetry batches; `latency` is a sketch, [[bucket, count], ...] of ms."""

    answers = models.BigIntegerField(default=0)
    failures = models.BigIntegerField(default=0)
    scored = models.BigIntegerField(default=0)
    correct = models.BigIntegerField(default=0)
    degraded = models.BigIntegerField(default=0)
    latency = models.JSONField(default=list)

    class Meta:
        abstract = True
