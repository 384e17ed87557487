"""The gateway processes of one node tell each other what they picked, over Unix datagram sockets in a run folder.

Owns: the sockets, the message format, coalescing, finding peers and noticing that one is gone. Does not own: what the
news mean (`Router.take_news` and `Router.hear`).

Every process binds `<folder>/<pid>.sock` and sends its news to every other socket there, at most once per 2 ms.
Nothing has to arrive: loads are totals that are repeated every 250 ms, a process that is silent for a second or whose
socket refuses has its load dropped, and a path whose beginning is unknown is asked for. A message starts with a
version byte; what cannot be read is counted and ignored, so that two releases can run side by side during an upgrade.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from router.endpoints import LoadNews
from router.errors import SiblingsError
from router.prefix_index import PathNews
from router.route import News, Router

# First byte of every message. Raise it when a field changes its meaning; added fields at the end need no new version.
VERSION = 1

# Between two rounds of news while there are some, and while there are none: 2 ms is far below a time to first token,
# and looking 100 times a second for nothing costs under 0.1 % of a core.
_BUSY_TICK_S = 0.002
_IDLE_TICK_S = 0.010

# Rounds without news before the slower pace.
_IDLE_AFTER_COUNT = 50

# How often the whole load is repeated and the folder is looked at, and when a silent sibling's load is dropped.
_REPEAT_S = 0.25
_SILENT_S = 1.0

# Bytes of one datagram: well under the kernel's default send buffer (208 KiB), which holds datagrams whole.
_MESSAGE_MAX_BYTES = 48 * 1024

# A path's hashes in one message (9 bytes each); the rest of a longer path is not shared. 4,096 blocks are 15 MiB of
# prompt.
_PATH_MAX_BLOCKS = 4_096

# Messages kept for a sibling that does not read just now (half a second of busy ticks); beyond, the oldest are dropped.
_BACKLOG_MAX_COUNT = 256

# Datagrams read per wake-up, so that a flood cannot hold the event loop.
_READS_MAX_COUNT = 64

# Bytes of a Unix socket's path on Linux, without the final zero.
_PATH_MAX_BYTES = 107


@dataclass(frozen=True, slots=True)
class SiblingsState:
    """For telemetry: siblings heard within a second, and counts since the start."""

    peer_count: int
    sent_count: int
    dropped_count: int
    unreadable_count: int


@dataclass(frozen=True, slots=True)
class Message:
    """One datagram. `sender` is new for every start of a process; `socket_name` is where answers go."""

    sender: str
    socket_name: str
    news: News = field(default_factory=News)
    wanted: tuple[tuple[str, int], ...] = ()
    """(endpoint id, last block) of paths whose beginning the sender lacks."""
    leaving: bool = False
    joining: bool = False
    """The sender has just started and asks this one sibling for every path that it knows."""


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    news = message.news
    body = [
        message.sender,
        message.socket_name,
        [
            [each.endpoint_id, each.backlog_s, each.waiting_count, each.decoding_count, each.kv_tokens]
            for each in news.loads
        ],
        [[each.endpoint_id, each.base, each.base_blocks, list(each.tail), each.stamp_us] for each in news.paths],
        news.withdrawn,
        news.lost,
        message.wanted,
        message.leaving,
        message.joining,
    ]
    packed: bytes = msgpack.packb(body)
    return bytes((VERSION,)) + packed


def decode(data: bytes) -> Message | None:
    """The message in a datagram; None for one that is not of this version or cannot be read."""
    if not data or data[0] != VERSION:
        return None
    try:
        body: list[Any] = msgpack.unpackb(memoryview(data)[1:])
        sender, socket_name, loads, paths, withdrawn, lost, wanted, leaving = body[:8]
        news = News(
            tuple(LoadNews(str(a), float(b), int(c), int(d), int(e)) for a, b, c, d, e in loads),
            tuple(PathNews(str(a), int(b), int(c), [*map(int, d)], int(e)) for a, b, c, d, e in paths),
            tuple((str(a), int(b), int(c)) for a, b, c in withdrawn),
            tuple((str(a), int(b)) for a, b in lost),
        )
        wants = tuple((str(a), int(b)) for a, b in wanted)
        return Message(str(sender), str(socket_name), news, wants, bool(leaving), any(body[8:9]))
    except (ValueError, TypeError, msgpack.UnpackException):
        return None


def split(news: News) -> Iterator[News]:
    """The news in parts that each fit a datagram; nothing for no news."""
    loads: list[LoadNews] = []
    paths: list[PathNews] = []
    size = 0
    for load in news.loads:
        loads.append(load)
        size += len(load.endpoint_id) + 40
        if size > _MESSAGE_MAX_BYTES:
            yield News(loads=tuple(loads))
            loads, size = [], 0
    for path in news.paths:
        tail = path.tail[:_PATH_MAX_BLOCKS]
        length = len(path.endpoint_id) + 9 * len(tail) + 40
        if size + length > _MESSAGE_MAX_BYTES and (loads or paths):
            yield News(tuple(loads), tuple(paths))
            loads, paths, size = [], [], 0
        paths.append(path if len(tail) == len(path.tail) else PathNews(*_fields(path, tail)))
        size += length
    if loads or paths:
        yield News(tuple(loads), tuple(paths))
    # After the paths they speak of.
    for start in range(0, max(len(news.withdrawn), len(news.lost)), _CORRECTIONS_MAX_COUNT):
        end = start + _CORRECTIONS_MAX_COUNT
        yield News(withdrawn=news.withdrawn[start:end], lost=news.lost[start:end])


def _fields(path: PathNews, tail: Sequence[int]) -> tuple[str, int, int, Sequence[int], int]:
    return path.endpoint_id, path.base, path.base_blocks, tail, path.stamp_us


# Withdrawals and losses in one datagram: each has up to 128 bytes of name and two numbers.
_CORRECTIONS_MAX_COUNT = 128


class Siblings:
    """Keeps a router's view of the node whole. `start` binds and joins; `stop` says goodbye.

    Raises SiblingsError from `start` where the folder cannot be used. Mutable: owns a socket.
    """

    def __init__(
        self,
        router: Router,
        folder: Path,
        *,
        name: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._folder = folder
        self._name = f"{name or os.getpid()}.sock"
        self._sender = f"{name or os.getpid()}-{secrets.token_hex(4)}"
        self._clock = clock
        self._socket: socket.socket | None = None
        self._folder_fd = -1
        self._backlogs: dict[str, deque[bytes]] = {}
        """Messages per sibling socket that it has not taken yet; its keys are the siblings."""
        self._joiners: dict[str, Iterator[PathNews]] = {}
        """The paths that a sibling which has just started is still to be told."""
        self._heard_s: dict[str, float] = {}
        """When each sender was last heard."""
        self._timer: asyncio.TimerHandle | None = None
        self._repeat_at_s = 0.0
        self._quiet_count = 0
        self._sent_count = self._dropped_count = self._unreadable_count = 0

    @property
    def state(self) -> SiblingsState:
        """Peers and counts."""
        return SiblingsState(len(self._heard_s), self._sent_count, self._dropped_count, self._unreadable_count)

    async def start(self) -> None:
        """Bind, find the others, and tell them of us."""
        self._prepare_folder()
        made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        made.setblocking(False)
        try:
            with contextlib.suppress(FileNotFoundError):
                (self._folder / self._name).unlink()  # left by a dead process of the same number
            made.bind(self._address(self._name))
            (self._folder / self._name).chmod(0o600)
        except OSError as error:
            made.close()
            os.close(self._folder_fd)
            raise SiblingsError(f"No socket can be made in {self._folder}: {error.strerror or error}.") from error
        self._socket = made
        self._look_around(self._clock())
        for name, backlog in list(self._backlogs.items()):
            backlog.append(encode(Message(self._sender, self._name, joining=True)))
            if self._drain(name, backlog):
                break  # one living sibling is enough
            self._forget_socket(name)
        asyncio.get_running_loop().add_reader(made.fileno(), self._readable)
        self._tick()

    async def stop(self) -> None:
        """Tell the others that our load is gone, and close. May be called twice."""
        if self._socket is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._post(encode(Message(self._sender, self._name, leaving=True)))
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        with contextlib.suppress(OSError):
            (self._folder / self._name).unlink()
        os.close(self._folder_fd)

    def _prepare_folder(self) -> None:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self._folder.stat()
            if facts.st_uid != os.geteuid():
                raise SiblingsError(
                    f"{self._folder} belongs to user {facts.st_uid}; our own ({os.geteuid()}) was expected."
                )
            if stat.S_IMODE(facts.st_mode) & 0o077:
                self._folder.chmod(0o700)
            self._folder_fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise SiblingsError(f"The run folder {self._folder} cannot be used: {error.strerror or error}.") from error

    def _address(self, name: str) -> str:
        """A socket's address. A path too long for one is reached through the open folder (Linux)."""
        path = str(self._folder / name)
        return path if len(path.encode()) <= _PATH_MAX_BYTES else f"/proc/self/fd/{self._folder_fd}/{name}"

    # --- out ---------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        """One round: tell the news, and every 250 ms everything."""
        if self._socket is None:
            return
        now_s = self._clock()
        repeat = now_s >= self._repeat_at_s
        if repeat:
            self._repeat_at_s = now_s + _REPEAT_S
            self._look_around(now_s)
        if repeat or self._router.has_news:
            self._quiet_count = 0 if self._router.has_news else self._quiet_count + 1
            self._tell(self._router.take_news(now_s, everything=repeat), always=repeat)
        else:
            self._quiet_count += 1
            self._flush()
        for name in list(self._joiners):
            self._bring_up_to_date(name)
        pace_s = _BUSY_TICK_S if self._quiet_count < _IDLE_AFTER_COUNT else _IDLE_TICK_S
        self._timer = asyncio.get_running_loop().call_later(pace_s, self._tick)

    def _tell(self, news: News, *, always: bool) -> None:
        """Send news to all; `always` even when there are none, as a sign of life."""
        if not self._backlogs:
            return
        parts = list(split(news))
        for part in parts or ([News()] if always else []):
            self._post(encode(Message(self._sender, self._name, part)))

    def _bring_up_to_date(self, name: str) -> None:
        """Tell a sibling that has just started some more paths, one datagram a round: encoding one takes about 1 ms."""
        backlog = self._backlogs.get(name)
        if backlog is None:
            del self._joiners[name]
            return
        if backlog:
            return
        self._quiet_count = 0
        paths: list[PathNews] = []
        size = 0
        for path in self._joiners[name]:
            paths.append(path)
            size += 9 * len(path.tail)
            if size > _MESSAGE_MAX_BYTES // 2:
                break
        else:
            del self._joiners[name]
        backlog.extend(encode(Message(self._sender, self._name, part)) for part in split(News(paths=tuple(paths))))

    def _post(self, data: bytes) -> None:
        for backlog in self._backlogs.values():
            if len(backlog) >= _BACKLOG_MAX_COUNT:
                backlog.popleft()
                self._dropped_count += 1
            backlog.append(data)
        self._flush()

    def _flush(self) -> None:
        """Send what each sibling takes now; forget the ones that are gone."""
        gone = [name for name, backlog in self._backlogs.items() if backlog and not self._drain(name, backlog)]
        for name in gone:
            self._forget_socket(name)

    def _drain(self, name: str, backlog: deque[bytes]) -> bool:
        """False where nobody is bound to the socket any more."""
        assert self._socket is not None
        address = self._address(name)
        while backlog:
            try:
                self._socket.sendto(backlog[0], address)
            except (BlockingIOError, InterruptedError):
                return True
            except (ConnectionRefusedError, FileNotFoundError, ConnectionResetError):
                return False
            except OSError:
                self._dropped_count += 1  # too large for this kernel's buffers, or no memory now
            else:
                self._sent_count += 1
            backlog.popleft()
        return True

    # --- in ----------------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        for _ in range(_READS_MAX_COUNT):
            if self._socket is None:
                return
            try:
                data = self._socket.recv(256 * 1024)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._unreadable_count += 1
                return
            message = decode(data)
            if message is None:
                self._unreadable_count += 1
            elif message.sender != self._sender:
                self._hear(message)

    def _hear(self, message: Message) -> None:
        if message.leaving:
            self._forget_sender(message.sender)
            self._backlogs.pop(message.socket_name, None)
            return
        now_s = self._clock()
        self._heard_s[message.sender] = now_s
        backlog = self._backlogs.get(message.socket_name)
        if backlog is None and _is_socket_name(message.socket_name):
            backlog = self._backlogs[message.socket_name] = deque()
        if message.joining and backlog is not None:
            self._joiners[message.socket_name] = self._router.whole_paths()
        missing = self._router.hear(message.sender, message.news, now_s)
        if backlog is None:
            return
        paths = tuple(path for path in (self._router.whole_path(*each) for each in message.wanted) if path is not None)
        replies = [Message(self._sender, self._name, part) for part in split(News(paths=paths))]
        for start in range(0, len(missing), _CORRECTIONS_MAX_COUNT):
            wanted = tuple(missing[start : start + _CORRECTIONS_MAX_COUNT])
            replies.append(Message(self._sender, self._name, wanted=wanted))
        for reply in replies[: _BACKLOG_MAX_COUNT - len(backlog)]:
            backlog.append(encode(reply))

    # --- who is there ------------------------------------------------------------------------------------------------

    def _look_around(self, now_s: float) -> None:
        """Find new sockets in the folder; drop the load of siblings that are silent."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):  # noqa: PTH208 - names are what is wanted, and this is every 250 ms
                if name != self._name and name not in self._backlogs and _is_socket_name(name):
                    self._backlogs[name] = deque()
        self._router.expire_peers(now_s - _SILENT_S)
        for sender, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > _SILENT_S:
                self._forget_sender(sender)

    def _forget_sender(self, sender: str) -> None:
        self._heard_s.pop(sender, None)
        self._router.forget_peer(sender)

    def _forget_socket(self, name: str) -> None:
        """Nobody is bound to it: its process is dead. The file is removed, unless another process has just made it
        anew.
        """
        self._backlogs.pop(name, None)
        with contextlib.suppress(OSError):
            (self._folder / name).unlink()
        owner = name.removesuffix(".sock")
        for sender in [each for each in self._heard_s if each.rpartition("-")[0] == owner]:
            self._forget_sender(sender)


def _is_socket_name(name: str) -> bool:
    return name.endswith(".sock") and "/" not in name and not name.startswith(".")
