"""Containers, with and without their runtimes' help: CRIU's action script and what it calls (docs/architecture.md)."""
