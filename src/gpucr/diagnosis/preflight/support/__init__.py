"""All that preflight knows to be unsupported or lost, with the texts of its findings.

The checks decide which facts apply to a job or machine. The documentation site's page of findings is
generated from the same facts.
"""
