"""All that gpucr reads is either what it wrote or refused with a reason: one target a format, fed with damage.

``corpus/TARGET/`` holds what each target begins from: sound inputs, and those that once got through. A new input that
does gets its file there.
"""
