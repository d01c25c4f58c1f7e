"""Kind `interposed`: device memory leaves the process by its interposer, and its bytes by a vault of gpucr's own.

Gate closed and driver locked are one: so a process stands still. To take its memory out, or to give it back, the driver
is unlocked for a moment while the gate keeps everybody but the agent out. What the driver checkpoints afterwards is the
context alone. The descriptors of the memory keep it alive, here and in the guard, whatever becomes of either.
"""
