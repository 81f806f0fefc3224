"""Offline generation of a large file, which can be stopped and taken up; see :mod:`local_backend.batch`."""
