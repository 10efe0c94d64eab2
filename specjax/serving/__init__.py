"""Serving: requests in, rows of one static batch shared among them, tokens out.

`requests`, `policies`, `plans`, `scheduler`, `arrivals`, `summary` and `simulate` are plain Python; what
touches a device imports them, not the other way round.
"""
