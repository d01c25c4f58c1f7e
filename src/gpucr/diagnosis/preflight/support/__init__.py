"""What preflight knows that cannot be checkpointed, or will not come back: the texts of all that it says.

The checks say of a job or machine whether it is so. docs/what-comes-back.md is made of the same facts.
"""
