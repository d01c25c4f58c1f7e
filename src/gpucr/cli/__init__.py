"""The `gpucr` command: one file per sub-command, each exporting ``command``."""
