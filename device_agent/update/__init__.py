"""One update, step by step: poll, verify, fetch, apply, stage, activate, probation, report.

The steps work, `device_agent.machine` decides the order and remembers it.
"""
