"""The CRIU engine: find or provide a CRIU, drive it by RPC, and read the reason for a failure from its log.

``engine.Criu`` is the entry point: dump, restore and check with notifications, a deadline, and a clean end on Ctrl-C.
``install`` finds a CRIU and ``provide`` fetches one; ``options`` chooses CRIU's settings for a job.
"""
