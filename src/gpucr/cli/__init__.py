"""The `gpucr` command: one file a sub-command, each exporting ``command``."""
