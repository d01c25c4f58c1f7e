"""Whole workflows over jobs: suspend, resume, dump, restore, inspect, list. One a file; they alone join rooms."""
