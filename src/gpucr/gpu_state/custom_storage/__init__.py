"""Kind `custom_storage`: the driver (615 and newer) maps device memory into a process of gpucr's, which copies it.

That process is the carrier: nobody else can end what it has begun with the driver. It outlives gpucr, and brings back
what it holds when gpucr dies. Nothing here has run on such a driver: there was none. It is built on the simulated one.
"""
