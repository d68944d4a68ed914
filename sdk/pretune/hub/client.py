"""The hub, through huggingface_hub only: what may pass is tried again, each failure is told in one line."""

from __future__ import annotations

import contextlib
import errno
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pretune.errors import HubError, OptionError, PretuneError, one_line

T = TypeVar("T")

ATTEMPTS = 3
LONGEST_WAIT = 60.0
"""Seconds that a hub may ask to wait before the next attempt; for longer, the user decides."""

TRANSIENT = (408, 429, 500, 502, 503, 504)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Hub:
    """One hub.

    Parameters
    ----------
    endpoint : str, optional
        By default ``HF_ENDPOINT``, or else huggingface.co.
    token : str, optional
        By default ``HF_TOKEN``, or else that of ``hf auth login``.

    Raises
    ------
    OptionError
        If that cannot be a token.
    """

    def __init__(self, endpoint: str | None = None, token: str | None = None) -> None:
        # It takes a while to import, and reads the environment then: not before it is needed.
        import huggingface_hub

        import pretune

        if token is not None and not re.fullmatch(r"[!-~]+", token):  # it is not shown: it may be a real one
            raise OptionError("--token is none: it is empty, or holds more than ASCII without spaces")
        self.api = huggingface_hub.HfApi(
            endpoint=endpoint.rstrip("/") if endpoint else None,
            token=token,
            library_name="pretune",
            library_version=pretune.__version__,
        )
        self.endpoint: str = self.api.endpoint
        self.timeout = float(huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT)

    def ask(self, what: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function of huggingface_hub.

        Parameters
        ----------
        what : str
            What is asked for, such as ``"pretune/cpu-x86-64-v4@main"``: the subject of an error.

        Raises
        ------
        HubError
            In one line, whatever goes wrong.
        """
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self._patience():
                    return function(*args, **kwargs)
            except PretuneError:
                raise
            except Exception as error:  # httpx, hf_xet and the operating system each have their own
                reason = _reason(error)
                wait = _wait_before_retry(reason, attempt)
                if attempt == ATTEMPTS or wait is None:
                    raise HubError(explain(reason, what, self.endpoint)) from reason
                time.sleep(wait)
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """Let no request wait for longer than `timeout`, nor for longer than it takes to see that it failed.

        Most requests of the client have no time limit, and some it repeats for as long as ``Retry-After``
        says. Others in this process may use its session as well, so it is given back as it was.
        """
        from huggingface_hub.utils import get_session, hf_raise_for_status

        def limit(request: Any) -> None:
            given = request.extensions["timeout"]
            request.extensions["timeout"] = {
                step: self.timeout if seconds is None else min(seconds, self.timeout)
                for step, seconds in given.items()
            }

        def fail(response: Any) -> None:
            if response.status_code in TRANSIENT:
                hf_raise_for_status(response)

        hooks = get_session().event_hooks
        hooks["request"].append(limit)
        hooks["response"].append(fail)
        try:
            yield
        finally:
            hooks["request"].remove(limit)
            hooks["response"].remove(fail)

    def reach(self, what: str) -> None:
        """Fail at once if nobody answers: where the client retries by itself, that takes minutes."""
        from huggingface_hub.utils import get_session

        self.ask(what, get_session().head, self.endpoint, timeout=self.timeout)

    def commit_of(self, repo: str, revision: str) -> str:
        """Commit, 40 hex digits, that a branch or tag of a repository points to: one request."""
        asked = f"{repo}@{revision}"
        info = self.ask(asked, self.api.model_info, repo, revision=revision, timeout=self.timeout)
        if info.sha is None or not is_commit(info.sha):  # it will be the name of a folder
            raise HubError(f"{asked}: {self.endpoint} names no commit; check that it is a hub: --endpoint")
        return info.sha

    def download(self, repo: str, commit: str, name: str, folder: Path) -> Path:
        """Bring one file of a commit into a folder, by a temporary name and a rename: two requests."""
        path = self.ask(
            f"{repo}@{commit[:12]}: {name}",
            self.api.hf_hub_download,
            repo,
            name,
            revision=commit,
            local_dir=folder,
            # Else a copy in the client's own cache, which is never checked, would be taken.
            cache_dir=folder / ".cache",
            etag_timeout=self.timeout,
        )
        return Path(path)


def is_commit(revision: str) -> bool:
    """Whether a revision is a commit, which never changes."""
    return re.fullmatch("[0-9a-f]{40}", revision) is not None


def _reason(error: BaseException) -> BaseException:
    """Why a call failed: the client's last word may be that no local file was found, or an upload failed."""
    while error.__cause__ is not None and is_named(error, "LocalEntryNotFoundError", "RuntimeError"):
        error = error.__cause__
    return error


def explain(error: BaseException, what: str, endpoint: str) -> str:
    """One line for whatever huggingface_hub raises: what failed, why, and what to do."""
    if is_named(error, "OfflineModeIsEnabled", "LocalEntryNotFoundError"):
        return f"{what}: HF_HUB_OFFLINE forbids asking the hub; unset it, or use what is here: pretune hub ls"
    if is_named(error, "ProxyError"):
        return (
            f"{what}: the proxy refuses ({one_line(error)}); check HTTPS_PROXY, HTTP_PROXY and NO_PROXY, "
            "or name a mirror: --endpoint"
        )
    if is_named(error, "TimeoutException"):
        return f"{what}: {endpoint} stopped answering; run it again, or set HF_HUB_DOWNLOAD_TIMEOUT (seconds)"
    if is_named(error, "TransportError", "ConnectionError"):
        return (
            f"{what}: cannot reach {endpoint} ({one_line(error)}); check the network, "
            "or name a mirror: --endpoint or HF_ENDPOINT"
        )
    status = _status(error)
    if status is not None:
        return f"{what}: {_explain_status(error, status, endpoint)}"
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return f"{what}: the disk is full; free some space, or set PRETUNE_CACHE to a folder with more"
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
        return f"{what}: cannot write {error.filename}; set PRETUNE_CACHE to a folder that can be written"
    if "Consistency check failed" in str(error):
        return f"{what}: the file came incomplete; run it again"
    return f"{what}: {' '.join(str(error).split())[:300] or type(error).__name__}"


def _explain_status(error: BaseException, status: int, endpoint: str) -> str:
    said = " ".join((getattr(error, "server_message", None) or "").split())
    if is_named(error, "GatedRepoError"):
        return f"access must be asked for at {endpoint}; then log in: hf auth login"
    if status == 401 and re.search("expired|invalid (credentials|username)", said, re.IGNORECASE):
        return "the token is not valid, or has expired; make a new one and log in: hf auth login"
    if is_named(error, "RevisionNotFoundError"):
        return "there is no such revision; pretune hub info lists the versions of a repository"
    if is_named(error, "EntryNotFoundError"):
        return "the repository lacks this file; tell its owner, or pull another version: --revision"
    if is_named(error, "RepositoryNotFoundError") or status == 401:  # the hub does not tell which
        return (
            f"{endpoint} has no such repository, or it is private; check the name (pretune hub ls), "
            "or log in: hf auth login"
        )
    if status == 403:
        return f"{endpoint} refuses ({said or 403}); use a token that may do this: --token, or hf auth login"
    if status == 412:
        return "somebody has changed the repository meanwhile; look at it, and run this again"
    if status == 429:
        seconds = _retry_after(error)
        when = f"in {seconds:.0f} s" if seconds is not None else "later"
        return f"{endpoint} takes no more requests for now (429); run it again {when}"
    if status >= 500:
        return f"{endpoint} fails ({status}); run it again later, or name a mirror: --endpoint"
    return f"{endpoint} answers {status}: {said or one_line(error)}"


def _wait_before_retry(error: BaseException, attempt: int) -> float | None:
    """Seconds to wait before asking again; None if that would not help, or the client has tried it."""
    if _status(error) not in TRANSIENT:
        return None
    seconds = _retry_after(error)
    if seconds is None:
        return float(2 ** (attempt - 1))
    return seconds if seconds <= LONGEST_WAIT else None


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _retry_after(error: BaseException) -> float | None:
    response: Any = getattr(error, "response", None)
    value = response.headers.get("Retry-After", "") if response is not None else ""
    return float(value) if value.isdigit() else None


def is_named(error: BaseException | None, *names: str) -> bool:
    """Whether an error is of such a class; by name, since the client does not always use the same httpx."""
    return any(cls.__name__ in names for cls in type(error).__mro__)
