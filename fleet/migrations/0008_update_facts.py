from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0007_identities"),
    ]

    operations = [
        migrations.AddField(
            model_name="update",
            name="retry_failed",
            field=models.BooleanField(default=False),
        ),
        migrations.AddField(
            model_name="update",
            name="denied_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="update",
            name="unconfirmed_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="update",
            name="too_late_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="update",
            name="regressed_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="updatereportrow",
            name="fact",
            field=models.CharField(blank=True, max_length=32),
        ),
    ]
