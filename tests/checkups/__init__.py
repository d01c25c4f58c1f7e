"""Tests of what `gpucr doctor` looks at."""
