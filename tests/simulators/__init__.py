"""Stand-ins that speak the production ports and protocols: a release server, a disk, an engine."""
