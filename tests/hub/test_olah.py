"""The same repository served by olah, a mirror in use: what is read there is what is read from our server."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from spoil import REPO

from pretune.hub import cache
from pretune.hub.client import Hub
from pretune.hub.pull import pull_weights

OLAH = shutil.which("olah-cli")
pytestmark = pytest.mark.skipif(OLAH is None, reason="olah-cli is not on PATH; run: pip install olah")

CONFIG = """
[basic]
host = "127.0.0.1"
port = {port}
repos-path = "{root}/kept"
mirrors-path = ["{root}/mirrors"]
[accessibility]
offline = true
"""


@pytest.fixture
def olah(server, weights, tmp_path) -> Iterator[str]:
    """Address of an olah that serves a clone of the server's repository."""
    server.publish(REPO, weights)
    clone = tmp_path / "olah" / "mirrors" / "models" / REPO
    subprocess.run(["git", "clone", "-q", "--no-checkout", server.root / f"{REPO}.git", clone], check=True)
    for file in (server.root / "lfs").iterdir():
        kept = clone / ".git" / "lfs" / "objects" / file.name[:2] / file.name[2:4]
        kept.mkdir(parents=True)
        shutil.copy(file, kept)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = Path(tmp_path / "olah" / "olah.toml")
    settings.write_text(CONFIG.format(port=port, root=tmp_path / "olah"))
    log = (tmp_path / "olah" / "log").open("wb")
    process = subprocess.Popen(
        [str(OLAH), "--config", settings], cwd=tmp_path / "olah", stdout=log, stderr=log
    )
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, Path(log.name).read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_a_pull_from_either_is_the_same(server, hub, olah):
    ours = pull_weights(hub, REPO)
    before = {
        path.relative_to(ours.path): path.read_bytes() for path in ours.path.rglob("*") if path.is_file()
    }
    cache.remove(ours)
    theirs = pull_weights(Hub(olah), REPO)
    after = {
        path.relative_to(ours.path): path.read_bytes() for path in theirs.path.rglob("*") if path.is_file()
    }
    assert (theirs.path, theirs.record.manifest) == (ours.path, ours.record.manifest)
    assert before == after and cache.check(theirs) == []
