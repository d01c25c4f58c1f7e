"""The canaries themselves: programs over the driver API, run as ``python3 -m gpucr.diagnosis.canaries.programs NAME``.

Standard library and ctypes only. They run on a real driver and on a replacement.
"""
