"""A CI job that submits a model version."""
