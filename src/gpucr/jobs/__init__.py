"""Which processes form a job, the jobs' names, and the namespaces in which they run."""
