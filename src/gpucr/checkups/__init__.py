"""What `gpucr doctor` looks at: a machine, or a job.

One concern per module: a record of facts, ``look`` which reads them, and ``check`` which judges them and reads nothing.
Looking changes nothing and needs no privileges; what it cannot see, it reports as unknown.
"""
