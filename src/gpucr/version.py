"""The version of gpucr, in one place: packages, manifests and `gpucr --version` read it here."""

__version__ = "0.1.0"
