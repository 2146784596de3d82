"""What changes: one function per action, one transaction, audit line included."""
