"""Which processes are a job, the names that jobs have, and the namespaces in which they live."""
