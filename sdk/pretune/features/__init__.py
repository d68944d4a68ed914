"""What the networks see: programs as states, trace instructions as actions."""

from pretune.features.actions import ActionEncoder
from pretune.features.schema import SCHEMA_VERSION
from pretune.features.state import State, encode_state

__all__ = ["SCHEMA_VERSION", "ActionEncoder", "State", "encode_state"]
