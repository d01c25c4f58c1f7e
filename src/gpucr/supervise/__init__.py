"""Jobs that survive: one supervisor process per job takes checkpoints, notices failures and restores."""
