"""Whole workflows over jobs: suspend, resume, dump, restore, inspect, list. One per file; only they join rooms."""
