"""Retention of short sequences in the quadratic form, as a backend of fla. See `plugin.py`."""

__version__ = "0.1.0"
