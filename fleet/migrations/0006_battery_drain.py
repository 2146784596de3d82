from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('fleet', '0005_network_policy'),
    ]

    operations = [
        migrations.AddField(
            model_name='devicestats',
            name='drain',
            field=models.JSONField(blank=True, default=list),
        ),
        migrations.AddField(
            model_name='enrolment',
            name='thirsty_above',
            field=models.FloatField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name='enrolmentstats',
            name='drained',
            field=models.BigIntegerField(default=0),
        ),
        migrations.AddField(
            model_name='enrolmentstats',
            name='thirsty',
            field=models.BigIntegerField(default=0),
        ),
    ]
