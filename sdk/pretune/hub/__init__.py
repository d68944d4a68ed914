"""The hub: which weights cover a machine, and how they come there, are checked, pinned and published."""

from pretune.hub.sources import find_weights

__all__ = ["find_weights"]
