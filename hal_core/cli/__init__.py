"""The ``hal`` command."""
