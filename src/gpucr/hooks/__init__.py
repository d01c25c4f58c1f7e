"""Entry points that other software calls: CRIU's action script, for container runtimes (docs/architecture.md)."""
