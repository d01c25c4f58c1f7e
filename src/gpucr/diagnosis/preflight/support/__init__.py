"""All that preflight knows to be unsupported or lost, with the texts of its findings.

The checks decide which facts apply to a job or machine. The pages docs/what-comes-back.md and
docs/what-a-dump-refuses.md are generated from the same facts.
"""
