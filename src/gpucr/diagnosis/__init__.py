"""Findings: problems of a job, before anything is changed, and measured ones of a machine."""
