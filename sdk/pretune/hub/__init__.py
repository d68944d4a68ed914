"""The hub: which weights cover a machine, and how they come there, are checked, pinned and published."""
