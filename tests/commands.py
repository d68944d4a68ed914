"""`pretune-export` as the tests call it."""

from __future__ import annotations

import msgspec
from click.testing import CliRunner


def invoke(*args, status=0):
    from pretune_export.cli import main

    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == status, result.output
    return result


def config_of(root, **changes):
    from pretune_export.cli import _config

    return msgspec.structs.replace(_config(root / "config.toml"), **changes)
