"""Real gateway processes share picks, releases and corrections over their sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgpack
import pytest

from router.adapters.siblings import VERSION, Message, Siblings, decode, encode, split
from router.endpoints import Ending, LoadNews
from router.errors import SiblingsError
from router.prefix_index import PathNews
from router.route import News, RouterConfig
from tests.fakes.fleet import Fleet, endpoint, prompt
from tests.fakes.sibling_process import SiblingProcess


@pytest.fixture
def folder() -> Iterator[Path]:
    # A short path: pytest's own are longer than a socket's may be.
    with tempfile.TemporaryDirectory(prefix="sib") as name:
        yield Path(name) / "run"


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> float:
    """Wait until it holds; how long that took in seconds."""
    start_s = time.monotonic()
    while not condition():
        assert time.monotonic() - start_s < within_s, "it never held"
        time.sleep(0.01)
    return time.monotonic() - start_s


@contextlib.contextmanager
def processes(folder: Path, count: int) -> Iterator[list[SiblingProcess]]:
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(SiblingProcess(folder)) for _ in range(count)]
        eventually(lambda: all(each.ask("status")["peers"] == count - 1 for each in started))
        yield started


class TestProcesses:
    @pytest.mark.parametrize("count", [2, 4])
    def test_a_session_that_alternates_between_processes_keeps_its_engine(self, folder: Path, count: int) -> None:
        with processes(folder, count) as gateways:
            homes = set()
            for turn in range(12):
                gateway = gateways[turn % count]
                answer = gateway.pick(seed=1, tokens=8_000 + 500 * turn)
                homes.add(answer["endpoint"])
                if turn:
                    assert answer["cached"] >= 8_000 + 500 * (turn - 1) - 1_024
                gateway.ask("end", ticket=answer["ticket"])
                time.sleep(0.03)
            assert len(homes) == 1

    @pytest.mark.parametrize("count", [2, 4])
    def test_counts_converge_to_all_in_flight_and_then_to_zero(self, folder: Path, count: int) -> None:
        with processes(folder, count) as gateways:
            running = []
            for number in range(40):
                gateway = gateways[number % count]
                running.append((gateway, gateway.pick(seed=number, tokens=500)))
                time.sleep(0.005)
            # Every process sees all 40, and the picks spread because each sees the others' load.
            eventually(lambda: all(sum(each.in_flight().values()) == 40 for each in gateways))
            assert all(8 <= held <= 12 for held in gateways[0].in_flight().values())
            for gateway, answer in running:
                gateway.ask("end", ticket=answer["ticket"])
            eventually(lambda: all(sum(each.in_flight().values()) == 0 for each in gateways))
            assert all(each.ask("status")["kv_tokens"] == 0 for each in gateways)

    def test_a_killed_siblings_load_is_released_within_two_seconds(self, folder: Path) -> None:
        with processes(folder, 3) as gateways:
            victim, *others = gateways
            for number in range(10):
                victim.pick(seed=number, tokens=500)
            eventually(lambda: all(sum(each.in_flight().values()) == 10 for each in others))
            victim.kill()
            took_s = eventually(lambda: all(sum(each.in_flight().values()) == 0 for each in others))
            assert took_s < 2.0
            assert not (folder / f"{victim.pid}.sock").exists()

    def test_a_stopped_sibling_that_only_hangs_is_released_too_and_comes_back(self, folder: Path) -> None:
        with processes(folder, 2) as (hanging, other):
            hanging.pick(seed=1, tokens=500)
            eventually(lambda: sum(other.in_flight().values()) == 1)
            os.kill(hanging.pid, 19)
            try:
                assert eventually(lambda: sum(other.in_flight().values()) == 0) < 2.0
            finally:
                os.kill(hanging.pid, 18)
            eventually(lambda: sum(other.in_flight().values()) == 1)

    def test_a_late_process_hears_of_the_load_and_asks_for_the_paths_it_lacks(self, folder: Path) -> None:
        with processes(folder, 1) as (first,):
            before = first.pick(seed=1, tokens=8_000)
            first.ask("end", ticket=before["ticket"])
            held = first.pick(seed=2, tokens=500)
            time.sleep(0.1)
            with SiblingProcess(folder) as late:
                eventually(lambda: sum(late.in_flight().values()) == 1)
                after = first.pick(seed=1, tokens=9_000)
                first.ask("end", ticket=after["ticket"])
                eventually(lambda: self.cached(late) > 7_000)
            first.ask("end", ticket=held["ticket"])

    def test_a_respawned_process_is_told_what_the_engines_hold(self, folder: Path) -> None:
        with processes(folder, 2) as (one, _):
            homes = {}
            for seed in range(30):
                answer = one.pick(seed=seed, tokens=8_000)
                one.ask("end", ticket=answer["ticket"])
                homes[seed] = answer["endpoint"]
            with SiblingProcess(folder) as fresh:
                time.sleep(1.0)
                for seed, home in homes.items():
                    answer = fresh.pick(seed=seed, tokens=8_500)
                    assert (answer["endpoint"], answer["cached"] > 7_000) == (home, True)
                    fresh.ask("end", ticket=answer["ticket"])

    def cached(self, gateway: SiblingProcess) -> int:
        answer = gateway.pick(seed=1, tokens=9_500)
        gateway.ask("end", ticket=answer["ticket"], outcome="refused", first_token=False)
        return int(answer["cached"])

    def test_a_failed_pick_is_withdrawn_everywhere(self, folder: Path) -> None:
        with processes(folder, 2) as (one, two):
            answer = one.pick(seed=1, tokens=8_000)
            eventually(lambda: sum(two.in_flight().values()) == 1)
            one.ask("end", ticket=answer["ticket"], outcome="refused", first_token=False)
            eventually(lambda: sum(two.in_flight().values()) == 0)
            assert two.pick(seed=1, tokens=8_000)["cached"] == 0

    def test_noise_is_counted_and_ignored(self, folder: Path) -> None:
        with processes(folder, 1) as (one,):
            noise = [b"", b"\x02hello", b"\x01", b"\x01\xc1", b"\x01" + msgpack.packb([1, 2]), b"\xff" * 500]
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                for data in noise:
                    sender.sendto(data, str(folder / f"{one.pid}.sock"))
            eventually(lambda: one.ask("status")["unreadable"] == len(noise))
            assert one.pick(seed=1, tokens=500)["endpoint"] in "abcd"


def fleet() -> Fleet:
    return Fleet([endpoint(name) for name in "ab"], RouterConfig(share=True))


async def settle() -> None:
    await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def joined(folder: Path, *names: str) -> AsyncIterator[list[tuple[Fleet, Siblings]]]:
    """Routers in this process, each with its socket, that know each other."""
    made = []
    for name in names:
        one = fleet()
        made.append((one, Siblings(one.router, folder, name=name)))
    async with contextlib.AsyncExitStack() as stack:
        for _, siblings in made:
            await siblings.start()
            stack.push_async_callback(siblings.stop)
        await asyncio.sleep(0.6)
        assert [siblings.state.peer_count for _, siblings in made] == [len(names) - 1] * len(names)
        yield made


def sockets(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def modes(folder: Path) -> list[int]:
    return [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())]


def leave_dead_sockets(folder: Path, *names: str) -> None:
    folder.mkdir()
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
            left.bind(str(folder / name))


class TestSockets:
    async def test_the_socket_is_ours_alone_and_is_removed_at_the_end(self, folder: Path) -> None:
        async with joined(folder, "one") as ((_, siblings),):
            assert sockets(folder) == ["one.sock"] and modes(folder) == [0o700, 0o600]
            await siblings.stop()
            assert sockets(folder) == []

    async def test_a_dead_processs_socket_is_taken_over_or_pruned(self, folder: Path) -> None:
        leave_dead_sockets(folder, "one.sock", "dead.sock")
        async with joined(folder, "one"):
            assert sockets(folder) == ["one.sock"]

    async def test_a_path_too_long_for_a_socket_is_reached_all_the_same(self, folder: Path) -> None:
        async with joined(folder / ("d" * 90) / ("e" * 60), "one", "two"):
            pass

    async def test_a_goodbye_releases_at_once(self, folder: Path) -> None:
        async with joined(folder, "one", "two") as ((ours, one), (theirs, _)):
            decision = ours.pick(prompt(1, 500))
            await settle()
            assert theirs.load(decision.endpoint.endpoint_id)[0] == 1
            await one.stop()
            await settle()
            assert theirs.load(decision.endpoint.endpoint_id) == (0, 0, 0)

    async def test_a_burst_that_overflows_the_kernels_queue_arrives_whole(self, folder: Path) -> None:
        async with joined(folder, "one", "two") as ((ours, one), (theirs, _)):
            for number in range(300):
                ours.pick(prompt(number, 30_000))
            for _ in range(300):
                await asyncio.sleep(0.01)
                held = [sum(row.held_blocks for row in each.router.status(each.now_s)) for each in (ours, theirs)]
                if held[0] == held[1]:
                    break
            assert held[0] == held[1] > 300 * 100
            assert sum(theirs.load(name)[0] for name in "ab") == 300
            assert one.state.dropped_count == 0

    async def test_a_folder_that_cannot_be_used_is_one_clear_sentence(self) -> None:
        with tempfile.NamedTemporaryFile() as file:
            with pytest.raises(SiblingsError, match=r"^The run folder .* cannot be used: File exists\.$"):
                await Siblings(fleet().router, Path(file.name)).start()
            with pytest.raises(SiblingsError, match=r"^The run folder .* cannot be used: Not a directory\.$"):
                await Siblings(fleet().router, Path(file.name) / "below").start()


class TestMessages:
    NEWS = News(
        (LoadNews("a", 1.5, 2, 3, 400),),
        (PathNews("a", 7, 3, [2**64 - 1, 5], 123), PathNews("a", 9, 1, [], 5)),
        (("a", 2**64 - 1, 9),),
        (("b", 77),),
    )

    def test_a_message_survives_the_wire(self) -> None:
        message = Message("1-x", "1.sock", self.NEWS, (("a", 5),), leaving=False)
        assert decode(encode(message)) == message

    def test_a_newer_release_may_add_fields(self) -> None:
        data = encode(Message("1-x", "1.sock", self.NEWS))
        longer = bytes([VERSION]) + msgpack.packb([*msgpack.unpackb(data[1:]), "something new"])
        assert decode(longer) == decode(data)
        shorter = bytes([VERSION]) + msgpack.packb(msgpack.unpackb(data[1:])[:8])
        assert decode(shorter) == decode(data)

    def test_another_version_is_not_read(self) -> None:
        assert decode(bytes([VERSION + 1]) + encode(Message("1-x", "1.sock"))[1:]) is None

    def test_news_of_any_size_are_cut_into_datagrams_and_nothing_is_lost(self) -> None:
        loads = tuple(LoadNews(f"engine-{number}", 0.0, 1, 1, 1) for number in range(3_000))
        paths = tuple(PathNews("a", 0, 0, list(range(2**60, 2**60 + 900)), number) for number in range(50))
        corrections = tuple(("a", number, 1) for number in range(500))
        parts = list(split(News(loads, paths, corrections, (("a", 1),))))
        assert max(len(encode(Message("1-x", "1.sock", part))) for part in parts) < 100_000
        assert tuple(load for part in parts for load in part.loads) == loads
        assert tuple(path for part in parts for path in part.paths) == paths
        assert tuple(each for part in parts for each in part.withdrawn) == corrections
        assert tuple(each for part in parts for each in part.lost) == (("a", 1),)
        assert list(split(News())) == []

    def test_a_path_too_long_for_a_datagram_is_shared_as_far_as_it_fits(self) -> None:
        (part,) = split(News(paths=(PathNews("a", 0, 0, list(range(1, 9_000)), 1),)))
        assert list(part.paths[0].tail) == list(range(1, 4_097))


def test_a_siblings_failures_do_not_reach_our_breaker() -> None:
    ours, theirs = fleet(), fleet()
    for number in range(10):
        ours.end(ours.pick(prompt(number, 100), exclude=frozenset()), Ending.CANCELLED)
        theirs.router.hear("p", ours.router.take_news(ours.now_s), theirs.now_s)
    assert not theirs.router.broken()
