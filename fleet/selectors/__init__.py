"""What the API and the pages ask: read-only questions; each states its query count."""
