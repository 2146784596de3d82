"""What every layer of this app may use: no rows, no requests."""
