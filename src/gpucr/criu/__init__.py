"""The CRIU engine: finding or providing a CRIU, driving it by RPC, and reading the reason of a failure in its log.

``engine.Criu`` is the way in: dump, restore and check with notifications, a deadline, and a clean end on Ctrl-C.
``install`` finds a CRIU and ``provide`` fetches one; ``options`` chooses CRIU's settings for a job.
"""
