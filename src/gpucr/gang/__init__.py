"""The CUDA processes of a job as a unit: the driver's four actions on all, and which threads may run meanwhile."""

from gpucr.gang.actions import DEFAULT_LOCK_TIMEOUT_S, HALTS, Gang, Halt, discover, state_of, uses_libcuda

__all__ = ["DEFAULT_LOCK_TIMEOUT_S", "HALTS", "Gang", "Halt", "discover", "state_of", "uses_libcuda"]
