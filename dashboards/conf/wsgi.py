"""The WSGI entry point: what proxies say is checked, the poll path answers, the rest is Django's.

`granian --interface wsgi dashboards.conf.wsgi:application`
"""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "dashboards.conf.settings")  # noqa: TID251 -- Django's own switch

django_application = get_wsgi_application()

from builds.checks import refuse_to_start  # noqa: E402 -- needs the apps to be loaded
from fleet.edge import guarded, wrap  # noqa: E402 -- the same

refuse_to_start()

application = guarded(wrap(django_application))
