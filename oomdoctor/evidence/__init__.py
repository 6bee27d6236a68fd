"""Collectors: what the memory, the objects and the code are like at the moment of a failure or of a report.

A collector never runs code of the user's and allocates nothing on a device. What it cannot tell is ``Unavailable``.
Where the user has not loaded torch there are no tensors, and what looks at tensors is not loaded either.
"""
