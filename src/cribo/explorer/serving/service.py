"""The memory, the thread that computes, and the limits: what the routes of a server share."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from traceback import clear_frames
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from cribo.base.errors import InputError, MissingPackage, TooManyPixels, UnreadableImage, is_out_of_memory
from cribo.base.files import parse_json
from cribo.data.labelled.inputs import DecodedImage
from cribo.explorer.access import Denied
from cribo.explorer.config import Limits
from cribo.explorer.serving.batches import Batches, Compute
from cribo.explorer.serving.config import RequestLimits
from cribo.explorer.serving.memory_file import MemoryFile, TooManyPatches

Result = TypeVar("Result")

_FORM_BYTES = 2**16  # of a form, without its file
_RETRY: Mapping[str, str] = MappingProxyType({"retry-after": "1"})
_RAW = ("image/", "application/octet-stream", "application/dicom")

FIELD = "image"
"""Name of the field of a form that contains the picture."""


class Service:
    """What the routes of a server share.

    Args:
        memory: the memory file.
        pictures: limits of a picture.
        requests: limits of requests.
        batch_size: number of images to compute at once.

    Attributes:
        active: number of pictures in progress.
    """

    def __init__(self, memory: MemoryFile, pictures: Limits, requests: RequestLimits, *, batch_size: int) -> None:
        self.memory, self.pictures, self.requests = memory, pictures, requests
        self.active = 0
        self._batches = Batches(batch_size)
        # Starlette's threads keep the last result, here an image, until their next one.
        self._threads = ThreadPoolExecutor(thread_name_prefix="cribo-pictures")
        # One batch is computed while the images of the next are decoded; others wait as encoded bytes.
        self._decoded = asyncio.Semaphore(2 * batch_size)

    def close(self) -> None:
        """Stop the threads, after running requests."""
        self._batches.close()
        self._threads.shutdown()

    def submit(self, compute: Compute, item: Any) -> Future[Any]:
        """Compute something in the thread of the memory, after what is waiting; see `Batches.submit`."""
        return self._batches.submit(compute, item)

    async def compute(self, request: Request, compute: Compute, encode: Callable[[Any], Result]) -> Result:
        """Read the picture of a request, compute with it, and encode the result.

        Args:
            request: the request.
            compute: method of `memory` for a list of images.
            encode: encodes the result of an image, in another thread.

        Raises:
            Denied: the request is invalid, or the server is busy.
        """
        async with self.admitted():
            read = partial(self.decode, await self._content(request))
            return await self.process(request, read, compute, encode)

    async def process(
        self, request: Request, read: Callable[[], DecodedImage], compute: Compute, encode: Callable[[Any], Result]
    ) -> Result:
        """Read an image of a request, compute with it, and encode the result; see `compute`.

        `read` is called in another thread.
        """
        run = asyncio.get_running_loop().run_in_executor
        async with self._decoded:
            try:
                image = await run(self._threads, read)
                del read
                result = await self._computed(request, compute, image)
                return await run(self._threads, encode, result)
            except Denied:
                raise
            except Exception as error:
                clear_frames(error.__traceback__)  # which have the image
                raise self.as_denied(error) from error

    def decode(self, content: bytes) -> DecodedImage:
        """Decode an image within the limits; see `MemoryFile.read`."""
        return self.memory.read(content, max_pixels=self.pictures.pixels)

    async def json(self, request: Request) -> Mapping[str, Any]:
        """Return the JSON object in the body of a request.

        Raises:
            Denied: the body is too large, arrives too slowly or incompletely, or is not a JSON object.
        """
        try:
            found = parse_json(await Request(request.scope, self._limited(request, "The request")).body())
        except ClientDisconnect as error:
            raise Denied(HTTPStatus.BAD_REQUEST, "The request was not sent completely.") from error
        except ValueError as error:
            raise Denied(HTTPStatus.BAD_REQUEST, f"The body must be JSON: {error}.") from error
        if not isinstance(found, Mapping):
            raise Denied(HTTPStatus.BAD_REQUEST, f"The body must be a JSON object, got {found!r:.60}.")
        return found

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Count a request with pictures.

        Raises:
            Denied: as many as the limit are in progress.
        """
        if self.active >= self.requests.max_waiting:
            raise Denied(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{self.active} pictures are in progress, which is the limit: try again later, or start the server "
                "with a larger --max_waiting.",
                _RETRY,
            )
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def _content(self, request: Request) -> bytes:
        """Return the bytes of the picture, which is the body or a field of a form."""
        limited = Request(request.scope, self._limited(request, "The picture"))
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            if kind == "multipart/form-data":
                return await _field_of_form(limited)
            if kind and not kind.startswith(_RAW):
                raise Denied(
                    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                    f"The content type must be image/*, application/octet-stream or multipart/form-data, got {kind!r}: "
                    f"with curl, use -F {FIELD}=@FILE.",
                )
            return await limited.body()
        except ClientDisconnect as error:
            raise Denied(HTTPStatus.BAD_REQUEST, "The picture was not sent completely.") from error

    def _limited(self, request: Request, what: str) -> Receive:
        """Receive a body up to the limit, counting bytes as they arrive, in limited time."""
        most, deadline, arrived = self.pictures.bytes + _FORM_BYTES, time.monotonic() + self.requests.timeout, 0
        announced = request.headers.get("content-length", "")
        self._require_size(int(announced) if announced.isdecimal() else 0, most, what)

        async def receive() -> Message:
            nonlocal arrived
            try:
                message = await asyncio.wait_for(request.receive(), deadline - time.monotonic())
            except TimeoutError as error:
                raise Denied(
                    HTTPStatus.REQUEST_TIMEOUT,
                    f"{what} did not arrive within {self.requests.timeout:g} seconds: make it smaller, or start "
                    "the server with a larger --timeout.",
                ) from error
            arrived += len(message.get("body", b""))
            self._require_size(arrived, most, what)
            return message

        return receive

    def _require_size(self, size: int, most: int, what: str) -> None:
        if size > most:
            raise Denied(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"{what} has more than {self.pictures.max_megabytes:g} MB: make it smaller, or start the server "
                "with a larger --max_megabytes.",
            )

    async def _computed(self, request: Request, compute: Compute, image: Any) -> Any:
        """Wait for the result of an image, unless the client disconnects."""
        computed = asyncio.wrap_future(self._batches.submit(compute, image))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({computed, gone}, timeout=self.requests.timeout, return_when=asyncio.FIRST_COMPLETED)
            if computed.done():
                return computed.result()
            if gone.done():
                raise Denied(HTTPStatus.BAD_REQUEST, "The client has disconnected.")
            raise Denied(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"The picture was not ready within {self.requests.timeout:g} seconds: try again later, or start the "
                "server with a larger --timeout.",
                _RETRY,
            )
        finally:
            computed.cancel()
            gone.cancel()

    def as_denied(self, error: Exception) -> Exception:
        """Return the response to an error of a picture; other errors are returned unchanged."""
        if isinstance(error, TooManyPixels):
            pixels = error.reason.partition(" are more")[0]
            return Denied(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"The picture has {pixels}, but at most {self.pictures.max_megapixels:g} megapixels are allowed: make "
                "it smaller, or start the server with a larger --max_megapixels.",
            )
        if isinstance(error, UnreadableImage):
            return Denied(HTTPStatus.UNPROCESSABLE_ENTITY, f"The picture cannot be used: {error.reason}.")
        if isinstance(error, TooManyPatches):
            return Denied(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{error}.")
        if isinstance(error, MissingPackage):
            return Denied(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"The picture cannot be read by this server: {error}.")
        if is_out_of_memory(error):
            return Denied(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                "The server is out of memory: send a smaller picture, or start the server with a lower --batch_size.",
            )
        if isinstance(error, InputError):
            return Denied(HTTPStatus.UNPROCESSABLE_ENTITY, f"{error}.")
        return error


async def _field_of_form(request: Request) -> bytes:
    """Return the file of a form."""
    try:
        async with request.form(max_files=1, max_fields=16) as form:
            file = form.get(FIELD)
            if file is not None and not isinstance(file, str):
                return await file.read()
    except (Denied, ClientDisconnect):
        raise
    except Exception as error:  # the parser raises various errors for malformed forms
        raise Denied(HTTPStatus.BAD_REQUEST, f"The form is malformed: with curl, use -F {FIELD}=@FILE.") from error
    raise Denied(HTTPStatus.BAD_REQUEST, f"The form has no file named {FIELD!r}: with curl, use -F {FIELD}=@FILE.")


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects; the body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
