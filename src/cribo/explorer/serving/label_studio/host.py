"""The host of Label Studio: images and annotations of its tasks, within limits, and nothing from elsewhere."""

import base64
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

import httpx

from cribo.base.errors import ConfigError, DataError
from cribo.base.files import parse_json
from cribo.base.redaction import without_secrets

_EXPORT_BYTES = 2**28
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Host:
    """A host of Label Studio.

    Requests go to this scheme, name and port only, and redirects are not followed: tasks cannot make the server
    request addresses in its network.

    Args:
        url: address of Label Studio, such as http://127.0.0.1:8080.
        key: an access token of a user, personal or legacy; None for none.
        max_bytes: limit of an image.
        timeout: seconds in which an answer must arrive.

    Raises:
        ConfigError: the address is not one of HTTP, or has a user name.
    """

    def __init__(self, url: str, key: str | None, *, max_bytes: int, timeout: float) -> None:
        self._origin = _origin(url)
        if self._origin is None or "@" in urlsplit(url).netloc:
            raise ConfigError(
                f"--label_studio must be an address such as http://127.0.0.1:8080, got {without_secrets(url)}"
            )
        self._url = url if url.endswith("/") else f"{url}/"
        self._key, self._max_bytes, self._timeout = key, max_bytes, timeout
        self._access: str | None = None  # of a personal token, for some minutes
        self._client = httpx.Client(timeout=timeout, follow_redirects=False, trust_env=False)

    @property
    def name(self) -> str:
        """Name and port, part of the names of examples."""
        return urlsplit(self._url).netloc.lower()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def image(self, address: str) -> bytes:
        """Return the image of a task: of Label Studio itself (/data/...), or a data: URI.

        Raises:
            DataError: the address is of another host, or its content cannot be fetched within the limits.
        """
        if address[:5].lower() == "data:":
            return _of_data_uri(address, self._max_bytes)
        return self._get(address, self._max_bytes, "an image", "--max_megabytes")

    def tasks(self, project: int) -> list[Mapping[str, Any]]:
        """Return all tasks of a project with annotations, as Label Studio exports them.

        Raises:
            DataError: they cannot be fetched.
        """
        path = f"api/projects/{project}/export?exportType=JSON"
        try:
            found = parse_json(self._get(urljoin(self._url, path), _EXPORT_BYTES, "an export", "an export to a file"))
        except UnicodeDecodeError as error:
            raise DataError(f"the export of project {project} is not JSON") from error
        if not isinstance(found, list):
            raise DataError(f"the export of project {project} is not a list of tasks, but {found!r:.60}")
        return [task for task in found if isinstance(task, Mapping)]

    def _get(self, address: str, most: int, what: str, option: str) -> bytes:
        url = self._own(address)
        try:
            answer, content = self._read(url, most, what, option)
            if answer.status_code == HTTPStatus.UNAUTHORIZED and self._access is not None:
                self._access = None  # expired
                answer, content = self._read(url, most, what, option)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeEncodeError) as error:
            raise DataError(f"cannot fetch {_shown(url)}: {type(error).__name__}: {error}") from error
        if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise DataError(
                f"cannot fetch {_shown(url)}: status {answer.status_code}; give the access token of a user in "
                "LABEL_STUDIO_API_KEY or --label_studio_key_file"
            )
        if answer.is_redirect:
            raise DataError(
                f"cannot fetch {_shown(url)}: it redirects, to cloud storage or a login, which is not followed: upload "
                "the images to Label Studio, or let it serve local files"
            )
        if answer.status_code != HTTPStatus.OK:
            raise DataError(f"cannot fetch {_shown(url)}: status {answer.status_code}")
        return content

    def _read(self, url: str, most: int, what: str, option: str) -> tuple[httpx.Response, bytes]:
        """Send a request with the key; return the response and its content, whose size is checked while it arrives."""
        deadline, parts, size = time.monotonic() + self._timeout, list[bytes](), 0
        # Without compression, bytes that arrive are those in memory.
        headers = {"accept-encoding": "identity", **self._authorization()}
        with self._client.stream("GET", url, headers=headers) as answer:
            for part in answer.iter_raw():
                parts.append(part)
                size += len(part)
                if size > most:
                    raise DataError(f"{what} may have at most {most / 1e6:g} MB, {_shown(url)} has more: use {option}")
                if time.monotonic() > deadline:
                    raise DataError(
                        f"{_shown(url)} did not arrive within {self._timeout:g} seconds: start the server with a "
                        "larger --timeout"
                    )
        return answer, b"".join(parts)

    def _authorization(self) -> dict[str, str]:
        """Return the header with the access token; a personal token is first exchanged for a short-lived one."""
        if self._key is None:
            return {}
        if self._key.count(".") != 2:  # a legacy token is hexadecimal, a personal one has three parts
            return {"authorization": f"Token {self._key}"}
        if self._access is None:
            answer = self._client.post(urljoin(self._url, "api/token/refresh/"), json={"refresh": self._key})
            access = answer.json().get("access") if answer.status_code == HTTPStatus.OK else None
            if not isinstance(access, str):
                raise DataError(
                    f"Label Studio does not accept the access token (status {answer.status_code}): create another one "
                    "in its account settings"
                )
            self._access = access
        return {"authorization": f"Bearer {self._access}"}

    def _own(self, address: str) -> str:
        """Return the URL of an address at this host."""
        try:
            url = urljoin(self._url, address)
            origin = _origin(url)
        except ValueError:
            url, origin = address, None
        if origin is None or origin != self._origin:
            raise DataError(
                f"{_shown(address)} is not at the host of --label_studio, {self.name}, and is not fetched: upload the "
                "images to Label Studio, or let it serve local files"
            )
        return url


def _origin(url: str) -> tuple[str, str, int] | None:
    """Return scheme, name and port of an HTTP URL; None for other URLs."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            return None
        return parts.scheme, parts.hostname, parts.port or _DEFAULT_PORTS[parts.scheme]
    except ValueError:
        return None


def _of_data_uri(address: str, most: int) -> bytes:
    head, _, body = address[5:].partition(",")
    if len(body) > 3 * most:
        raise DataError(f"an image may have at most {most / 1e6:g} MB, a data: URI has more: use --max_megabytes")
    try:
        content = unquote_to_bytes(body)
        if head.lower().endswith(";base64"):
            content = base64.b64decode(content)
    except ValueError as error:
        raise DataError(f"a data: URI is not valid: {error}") from error
    if len(content) > most:
        raise DataError(f"an image may have at most {most / 1e6:g} MB, a data: URI has more: use --max_megabytes")
    return content


def _shown(address: str) -> str:
    """Format an address for error messages."""
    return repr(without_secrets(address[:200]))
