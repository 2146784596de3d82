"""Bundles are approved and published; half-signed metadata is kept aside."""

import django.db.models.deletion
from django.apps.registry import Apps
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor


def mark_published(apps: Apps, _schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Until now every bundle was published when it was made."""
    bundles = apps.get_model("builds", "Bundle").objects.all()
    bundles.update(
        approved_at=models.F("created_at"),
        published_at=models.F("created_at"),
        approved_by="system",
    )


class Migration(migrations.Migration):
    dependencies = [
        ("builds", "0004_delta_queue"),
    ]

    operations = [
        migrations.AddField(
            model_name="bundle",
            name="approved_at",
            field=models.DateTimeField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="bundle",
            name="approved_by",
            field=models.CharField(blank=True, default="", max_length=150),
            preserve_default=False,
        ),
        migrations.AddField(
            model_name="bundle",
            name="published_at",
            field=models.DateTimeField(blank=True, db_index=True, null=True),
        ),
        migrations.RunPython(mark_published, migrations.RunPython.noop, elidable=True),
        migrations.CreateModel(
            name="MetadataDraft",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("role", models.CharField(max_length=32)),
                ("version", models.PositiveBigIntegerField()),
                ("data", models.BinaryField()),
                ("waits_for", models.JSONField(default=list)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                (
                    "repository",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="drafts",
                        to="builds.repository",
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("repository", "role"), name="metadata_draft_role"
                    )
                ],
            },
        ),
    ]
