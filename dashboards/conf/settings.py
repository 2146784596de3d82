"""Django settings, derived from `dashboards.conf.env` alone."""

import secrets
from pathlib import Path
from typing import Any

import dj_database_url

from dashboards.conf.env import ROOT, environment

ENV = environment()
BASE_DIR = ROOT
STATE_DIR = ENV.state_dir
STATE_DIR.mkdir(parents=True, exist_ok=True)


def _secret_key() -> str:
    if ENV.secret_key:
        return ENV.secret_key
    path = STATE_DIR / "secret_key"
    if not path.exists():
        draft = path.with_suffix(f".{secrets.token_hex(4)}")
        draft.touch(mode=0o600)
        draft.write_text(secrets.token_urlsafe(50), encoding="ascii")
        try:
            draft.rename(path) if not path.exists() else draft.unlink()
        except OSError:
            draft.unlink(missing_ok=True)
    return path.read_text(encoding="ascii")


def _databases() -> dict[str, Any]:
    if ENV.database_url:
        return {"default": dj_database_url.parse(ENV.database_url, conn_max_age=60)}
    pragmas = (
        "PRAGMA journal_mode=WAL;PRAGMA synchronous=NORMAL;PRAGMA temp_store=MEMORY;"
        "PRAGMA mmap_size=268435456;PRAGMA cache_size=-65536;"
    )
    return {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": STATE_DIR / "sparsefleet.sqlite3",
            "CONN_MAX_AGE": None,
            "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20, "init_command": pragmas},
        }
    }


SECRET_KEY = _secret_key()
DEBUG = ENV.debug
ALLOWED_HOSTS = [host.strip() for host in ENV.allowed_hosts.split(",") if host.strip()]
CSRF_TRUSTED_ORIGINS = [
    item.strip() for item in ENV.csrf_trusted_origins.split(",") if item.strip()
]
DATABASES = _databases()
ATOMIC_REQUESTS = False

INSTALLED_APPS = [
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "django_htmx",
    "ninja",
    "builds",
    "fleet",
    "dashboards",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "builds.common.problem.DatabaseBusyMiddleware",
]

ROOT_URLCONF = "dashboards.conf.urls"
WSGI_APPLICATION = "dashboards.conf.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
STATIC_URL = "/static/"
STATIC_ROOT = STATE_DIR / "static"
STATIC_ROOT.mkdir(exist_ok=True)
WHITENOISE_USE_FINDERS = True
LOGIN_URL = "/login"
LOGIN_REDIRECT_URL = "/"
SESSION_COOKIE_SECURE = ENV.secure_cookies
CSRF_COOKIE_SECURE = ENV.secure_cookies
SESSION_COOKIE_HTTPONLY = True
SECURE_CONTENT_TYPE_NOSNIFF = True
X_FRAME_OPTIONS = "DENY"
DATA_UPLOAD_MAX_MEMORY_SIZE = 8 * 1024 * 1024

# The queue is a doorbell (ADR 0006): losing a message is harmless, because the tick looks at every
# row again.
QUEUE_DIR = STATE_DIR / "queue"
CELERY_BROKER_URL = ENV.broker_url or "filesystem://localhost/"
if not ENV.broker_url:
    CELERY_BROKER_TRANSPORT = "builds.common.file_queue:Transport"
CELERY_BROKER_TRANSPORT_OPTIONS: dict[str, Any] = (
    {"visibility_timeout": 300, "unacked_restore_interval": 5, "unacked_restore_throttle": 1}
    if ENV.broker_url
    else {
        "data_folder_in": str(QUEUE_DIR / "messages"),
        "data_folder_out": str(QUEUE_DIR / "messages"),
        "control_folder": str(QUEUE_DIR / "control"),
        "store_processed": False,
        "polling_interval": 0.1,
    }
)
if not ENV.broker_url:
    for _name in ("messages", "control"):
        Path(QUEUE_DIR / _name).mkdir(parents=True, exist_ok=True)
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_TASK_TIME_LIMIT = 280

# What the apps read from here instead of from the environment.
SPARSEFLEET = ENV

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} {name}: {message}", "style": "{"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
    "loggers": {
        "django.server": {"level": "WARNING"},
        "django.request": {
            "level": "ERROR"
        },  # TUF clients ask for the next root until there is none
        "httpx": {"level": "WARNING"},
        "tuf": {"level": "WARNING"},  # names every signature that a half-signed document lacks
    },
}
