"""The main job, played with the real parts: `manage.py demo`.

The demo starts the platform, one worker and device agents as separate processes and speaks to them
as CI and as a release manager
would: over HTTP with API tokens. It imports nothing of `builds` or `fleet`; what it can do,
anybody with a token can do.

    story.py      the steps, in order
    processes.py  child processes and their logs
    platform.py   the platform's own set-up commands, web and worker
    devices.py    configuration and start of agents
    client.py     the REST client of CI and of the release manager
    outcome.py    what was seen, checked and printed
"""
