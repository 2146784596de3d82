"""The WSGI entry point: the poll path answers first, all else is Django's.

`granian --interface wsgi dashboards.conf.wsgi:application`
"""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboards.conf.settings")  # noqa: TID251 -- Django's own switch

django_application = get_wsgi_application()

from builds.checks import refuse_to_start  # noqa: E402 -- needs the apps to be loaded
from fleet.edge import wrap  # noqa: E402 -- the same

refuse_to_start()

application = wrap(django_application)
