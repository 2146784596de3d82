"""Devices say whether their network is metered; rollouts say what that means."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0004_degrade_rules")]

    operations = [
        migrations.AddField(
            model_name="device",
            name="network",
            field=models.CharField(default="unknown", max_length=16),
        ),
        migrations.AddField(
            model_name="rollout",
            name="network_policy",
            field=models.CharField(default="any", max_length=16),
        ),
        migrations.AddField(
            model_name="rollout",
            name="unmetered_wait_s",
            field=models.FloatField(default=604800.0),
        ),
        migrations.AddField(
            model_name="update",
            name="waits_for",
            field=models.CharField(blank=True, max_length=200),
        ),
    ]
