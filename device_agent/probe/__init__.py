"""Hardware probe: what this device is, as a fingerprint."""
