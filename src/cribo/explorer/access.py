"""Who may send requests: checks of hosts and origins, and limits of failed logins; shared by the page and the server.

Existing middleware does not cover them:

- `TrustedHostMiddleware` cannot allow all IP addresses, which are needed in a container or behind a router.
- `CORSMiddleware` prevents other origins from reading responses, but not from sending requests.
"""

import ipaddress
import re
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from types import MappingProxyType
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

_SECONDS = 60
_FAILURES, _ALL_FAILURES = 10, 200  # of an address, and in total

HEADERS = [
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
]
"""Headers of every response."""


class Denied(Exception):
    """A request is refused, with a status, a reason for the client, and headers of the response."""

    def __init__(self, status: HTTPStatus, reason: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(reason)
        self.status, self.headers = status, headers


def require_known_host(scope: Scope, hosts: frozenset[str], advice: str) -> None:
    """Check the host name of a request, to prevent DNS rebinding. IP addresses are always allowed.

    Raises:
        Denied: the name is not among `hosts`; the reason ends with `advice`.
    """
    host = Headers(scope=scope).get("host", "").lower()
    name = re.sub(r":\d+$", "", host)
    if name not in hosts and not _is_ip_address(name):
        raise Denied(HTTPStatus.FORBIDDEN, f"Unknown host name {host!r}: {advice}")


def require_own_origin(scope: Scope) -> None:
    """Check that a browser does not send a request for a page of another origin.

    Raises:
        Denied: it does.
    """
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is not None and not _same_origin(origin, headers.get("host", "").lower()):
        raise Denied(HTTPStatus.FORBIDDEN, f"Requests from other origins are refused: {origin!r}.")
    if scope["method"] == "POST" and headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise Denied(HTTPStatus.FORBIDDEN, "Requests from other origins are refused.")


Attempt = tuple[float, str]
"""Time and address of a login."""


class FailureLimit:
    """Limits failed logins per minute, of an address and in total.

    The limit in total does not apply to an address that has logged in before, so that attempts of others do not lock
    it out; that of an address ends after a minute.

    Args:
        what: what fails, in messages, such as "logins".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._failed: deque[Attempt] = deque()
        self._trusted: OrderedDict[str, None] = OrderedDict()

    def begin(self, address: str) -> Attempt:
        """Count an attempt as failed until `succeed`; otherwise concurrent attempts would not count.

        Raises:
            Denied: too many attempts have failed.
        """
        now = time.monotonic()
        while self._failed and now - self._failed[0][0] > _SECONDS:
            self._failed.popleft()
        own = sum(other == address for _, other in self._failed)
        if own >= _FAILURES or (len(self._failed) >= _ALL_FAILURES and address not in self._trusted):
            raise Denied(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"Too many failed {self._what}: try again in {_SECONDS} seconds.",
                {"retry-after": str(_SECONDS)},
            )
        attempt = (now, address)
        self._failed.append(attempt)
        return attempt

    def succeed(self, attempt: Attempt) -> None:
        """Do not count an attempt."""
        with suppress(ValueError):
            self._failed.remove(attempt)
        self._trusted[attempt[1]] = None
        while len(self._trusted) > _ALL_FAILURES:
            self._trusted.popitem(last=False)


def client_network(scope: Scope) -> str:
    """Return the address of a client; for IPv6, its network, which one client can have as a whole."""
    host = (scope.get("client") or ("", 0))[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else host


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True


def _same_origin(origin: str, host: str) -> bool:
    """Whether an origin has the host and port of the request; the scheme's default port may be omitted."""
    try:
        page = urlsplit(origin.lower())
        server = urlsplit(f"{page.scheme}://{host}")
        default = {"http": 80, "https": 443}[page.scheme]
        return (page.hostname, page.port or default) == (server.hostname, server.port or default)
    except (KeyError, ValueError):
        return False
