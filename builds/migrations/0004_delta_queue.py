"""Deltas know whether devices wait for them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("builds", "0003_version_constant_time")]

    operations = [
        migrations.AddField(
            model_name="delta",
            name="is_urgent",
            field=models.BooleanField(default=False),
        ),
    ]
