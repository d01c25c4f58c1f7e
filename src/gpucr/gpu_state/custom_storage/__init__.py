"""Kind `custom_storage`: the driver (615 and newer) maps device memory into a gpucr process, which copies it.

That process is the carrier: only it can complete what it has begun with the driver. It outlives gpucr, and brings back
what it holds if gpucr dies. This has never run on such a driver, since none was available: it is built on the simulated
one.
"""
