"""All that gpucr reads is either what it wrote or refused with a reason: one target a format, fed with damage.

``stored``, ``wires`` and ``programs`` have the targets, which `test_formats` runs; stripes, /proc, manifests and images
have tests of their own, and a store's formats are in ``tests/store/formats.py``. `test_every_format` fails for a format
without a target.

``corpus/TARGET/`` holds what each target begins from: sound inputs, and those that once got through. A new input that
does gets its file there. A run of all tries a few examples a target, other ones each time; `scripts/storm` many.
"""
