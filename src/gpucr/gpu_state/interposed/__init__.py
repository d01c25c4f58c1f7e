"""Kind `interposed`: the interposer takes device memory out of the process, and a vault of gpucr reads its bytes.

A process is held by a closed gate plus the driver's lock. To move memory out or back, the driver is briefly unlocked
while the gate keeps everybody but the agent out. Afterwards the driver checkpoints only the context. Descriptors keep
the memory alive, here and in the guard, even if one of the two dies.
"""
