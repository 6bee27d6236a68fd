"""Copies of the user's process: how they are forked, and the walls that are put around them."""
