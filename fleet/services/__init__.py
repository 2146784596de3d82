"""What changes in this app: one function per action, one transaction, audit line included."""
