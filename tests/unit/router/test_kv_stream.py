"""One rank's event stream: gaps, replays, duplicates, restarts, floods and what cannot be read.

Owns: single situations of `kv_stream`, each by hand. Does not own: any mix of them
(`properties/test_kv_stream_properties`) or sockets (`integration/router/test_kv_subscriber`).
"""

from __future__ import annotations

import msgpack
import pytest

from router.kv_stream import (
    Action,
    Apply,
    AskReplay,
    Clear,
    ClearReason,
    RankStream,
    Reconnect,
    StreamLimits,
    StreamTrouble,
    published_at_s,
)


def payload(number: int, life: int = 0) -> bytes:
    """What message `number` of a life of the engine says; published a second after the one before it."""
    packed: bytes = msgpack.packb([1_000.0 * (life + 1) + number, [{"life": life, "n": number}], 0])
    return packed


def applied(actions: list[Action]) -> list[int]:
    return [action.sequence for action in actions if isinstance(action, Apply)]


def asked(actions: list[Action]) -> AskReplay:
    asks = [action for action in actions if isinstance(action, AskReplay)]
    assert len(asks) == 1, actions
    return asks[0]


def cleared(actions: list[Action]) -> list[ClearReason]:
    return [action.reason for action in actions if isinstance(action, Clear)]


class Told:
    """A stream whose messages are read as they are applied; remembers what was applied since the last clear."""

    def __init__(self, *, can_replay: bool = True, limits: StreamLimits | None = None) -> None:
        self.stream = RankStream(can_replay=can_replay, limits=limits)
        self.known: list[bytes] = []
        self.now_s = 100.0

    def _do(self, actions: list[Action]) -> list[Action]:
        for action in actions:
            if isinstance(action, Clear):
                self.known.clear()
            elif isinstance(action, Apply):
                self.known.append(action.payload)
                assert self.stream.decoded(readable=True) == []
        return actions

    def begin(self) -> list[Action]:
        self.stream.joined(self.now_s)
        return self._do(self.stream.begin(self.now_s))

    def live(self, number: int, life: int = 0) -> list[Action]:
        return self._do(self.stream.live(number, payload(number, life), self.now_s))

    def replay(self, ask: AskReplay, numbers: range | list[int], life: int = 0, *, end: bool = True) -> list[Action]:
        actions: list[Action] = []
        for number in numbers:
            actions += self._do(self.stream.replayed(ask.ask_id, number, payload(number, life), self.now_s))
        return actions + self.end(ask) if end else actions

    def end(self, ask: AskReplay) -> list[Action]:
        return self._do(self.stream.replay_ended(ask.ask_id, self.now_s))

    def wait(self, seconds: float) -> list[Action]:
        self.now_s += seconds
        return self._do(self.stream.tick(self.now_s))

    def cut(self) -> list[Action]:
        return self._do(self.stream.cut(self.now_s))

    def joined(self) -> list[Action]:
        return self._do(self.stream.joined(self.now_s))


def caught_up(count: int = 5, limits: StreamLimits | None = None) -> Told:
    """A stream that has applied messages 0 to count - 1 of the first life."""
    told = Told(limits=limits)
    told.replay(asked(told.begin()), range(count))
    assert told.known == [payload(number) for number in range(count)]
    assert told.stream.trouble() is None
    return told


def test_a_late_reader_asks_for_everything_and_what_comes_live_meanwhile_waits() -> None:
    told = Told()
    ask = asked(told.begin())
    assert (ask.start, ask.history) == (0, True)
    assert told.stream.trouble() is StreamTrouble.CATCHING_UP
    assert told.live(3) == told.live(4) == []
    assert applied(told.replay(ask, range(4))) == [0, 1, 2, 3, 4]
    view = told.stream.view()
    assert (view.trouble, view.next_sequence, view.complete, view.counts.lost_count) == (None, 5, True, 0)
    assert applied(told.live(5)) == [5]


def test_a_buffer_that_no_longer_begins_at_0_gives_a_part_and_says_so() -> None:
    told = Told()
    told.replay(asked(told.begin()), range(7, 12))
    assert told.known == [payload(number) for number in range(7, 12)]
    assert told.stream.view().complete is False
    assert told.stream.trouble() is None


def test_an_engine_that_published_nothing_yet_is_known_completely() -> None:
    told = Told()
    told.end(asked(told.begin()))
    assert told.stream.trouble() is None
    assert applied(told.live(0)) == [0]
    assert told.stream.view().complete


@pytest.mark.parametrize("upto", [7, 8, 9])
def test_lost_messages_are_replayed_in_order(upto: int) -> None:  # R10
    told = caught_up(5)
    ask = asked(told.live(7))
    assert (ask.start, ask.history) == (4, False)
    assert told.stream.trouble() is StreamTrouble.GAP
    assert told.live(8) == []
    told.replay(ask, range(4, upto + 1))
    assert told.known == [payload(number) for number in range(max(upto, 8) + 1)]
    view = told.stream.view()
    counts = view.counts
    assert (counts.gap_count, counts.replay_count, counts.lost_count) == (1, 2, 0)
    assert (view.trouble, view.held_count) == (None, 0)


def test_without_a_replay_socket_a_gap_clears_at_once() -> None:  # R10
    told = Told(can_replay=False)
    assert told.begin() == []
    for number in range(5):
        told.live(number)
    actions = told.live(10)
    assert (cleared(actions), applied(actions)) == ([ClearReason.GAP], [10])
    assert told.known == [payload(10)]
    assert told.stream.view().counts.lost_count == 5
    assert told.stream.view().complete is False


def test_a_gap_that_the_buffer_no_longer_covers_clears_and_takes_what_there_is() -> None:
    told = caught_up(5)
    ask = asked(told.live(30))
    actions = told.replay(ask, range(20, 31))
    assert cleared(actions) == [ClearReason.GAP]
    assert told.known == [payload(number) for number in range(20, 31)]
    assert told.stream.view().counts.lost_count == 15


def test_duplicates_are_dropped() -> None:
    told = caught_up(5)
    assert told.live(2) == told.live(4) == []
    assert applied(told.live(5)) == [5]
    assert told.live(5) == []
    assert told.stream.view().counts.duplicate_count == 3
    assert told.stream.view().counts.lives_count == 1


def test_messages_out_of_order_end_in_order() -> None:
    told = caught_up(5)
    ask = asked(told.live(6))
    assert applied(told.live(5)) == [5, 6]
    assert applied(told.replay(ask, range(4, 7))) == []
    assert told.known == [payload(number) for number in range(7)]


def test_a_restart_that_is_heard_live_clears_and_replays() -> None:  # R9
    told = caught_up(5)
    actions = told.live(0, life=1)
    assert cleared(actions) == [ClearReason.RESTART]
    ask = asked(actions)
    assert ask.start == 0
    assert told.live(1, life=1) == []
    told.replay(ask, range(1), life=1)
    assert told.known == [payload(0, 1), payload(1, 1)]
    assert told.stream.view().counts.lives_count == 2
    assert told.stream.view().complete


def test_a_restart_without_a_replay_socket_is_followed_too() -> None:  # R9
    told = Told(can_replay=False)
    told.begin()
    for number in range(5):
        told.live(number)
    actions = told.live(1, life=1)
    assert (cleared(actions), applied(actions)) == ([ClearReason.RESTART], [1])
    assert told.live(1, life=1) == []
    assert told.known == [payload(1, 1)]


def test_a_restart_of_an_idle_engine_is_found_by_asking_for_the_last_message() -> None:
    told = caught_up(5)
    assert told.wait(4.0) == []
    ask = asked(told.wait(1.5))
    assert (ask.start, ask.history) == (4, False)
    actions = told.replay(ask, [4, 5], life=1, end=False)
    assert cleared(actions) == [ClearReason.RESTART]
    told.replay(asked(actions), range(6), life=1)
    assert told.known == [payload(number, 1) for number in range(6)]


def test_a_restarted_engine_that_knows_fewer_messages_is_found_by_two_empty_answers() -> None:
    told = caught_up(5)
    ask = asked(told.wait(6.0))
    assert told.end(ask) == []
    assert len(told.known) == 5, "one empty answer may be a busy publisher's"
    second = asked(told.wait(0.3))
    actions = told.end(second)
    assert cleared(actions) == [ClearReason.RESTART]
    told.replay(asked(actions), range(2), life=1)
    assert told.known == [payload(0, 1), payload(1, 1)]


def test_one_empty_answer_of_a_busy_publisher_changes_nothing() -> None:
    told = caught_up(5)
    assert told.end(asked(told.wait(6.0))) == []
    told.replay(asked(told.wait(0.3)), [4])
    assert told.end(asked(told.wait(6.0))) == []
    assert len(told.known) == 5
    assert told.stream.view().counts.clear_count == 0


def test_an_idle_engine_is_asked_again_and_again_and_nothing_changes() -> None:
    told = caught_up(5)
    for _ in range(5):
        assert told.replay(asked(told.wait(6.0)), [4]) == []
    assert told.stream.view().counts.clear_count == 0
    assert len(told.known) == 5


def test_messages_lost_at_the_end_are_found_while_idle_and_a_live_socket_that_stays_dumb_is_replaced() -> None:
    told = caught_up(5)
    assert applied(told.replay(asked(told.wait(6.0)), [4, 5])) == [5]
    actions = told.replay(asked(told.wait(6.0)), [5, 6])
    assert applied(actions) == [6]
    assert Reconnect() in actions


def test_a_late_duplicate_older_than_the_digests_is_no_restart() -> None:
    told = Told()
    told.replay(asked(told.begin()), range(7, 12))
    assert told.live(3) == [], "published before what is known"
    assert told.stream.view().counts.duplicate_count == 1
    ask = asked(told.live(3, life=1))
    assert ask.start == 11
    told.replay(ask, [11])
    assert told.known == [payload(number) for number in range(7, 12)], "the replay says: the same life"
    assert told.stream.view().counts.lives_count == 1


def test_a_hole_in_a_replay_is_asked_for_again() -> None:
    told = Told()
    first = asked(told.begin())
    actions = told.replay(first, [0, 1, 2, 6, 7])
    second = asked(actions)
    assert second.start == 2
    told.replay(second, range(2, 8))
    assert told.known == [payload(number) for number in range(8)]
    assert told.stream.view().counts.lost_count == 0


def test_a_hole_that_every_replay_has_clears() -> None:
    told = caught_up(3)
    actions = told.live(6)
    for _ in range(3):
        actions = told.replay(asked(actions or told.wait(0.3)), [2, 5, 6])
    actions = actions or told.replay(asked(told.wait(0.3)), [2, 5, 6])
    assert cleared(actions) == [ClearReason.GAP]
    assert told.known == [payload(5), payload(6)]
    assert told.stream.view().counts.lost_count == 2
    assert told.stream.trouble() is None


def test_a_number_that_the_publisher_does_not_know_is_dropped() -> None:
    told = caught_up(3)
    actions = told.live(2**63)
    for _ in range(4):
        actions = told.replay(asked(actions), [2]) or told.wait(0.3)
        if not told.stream.view().held_count:
            break
    assert told.known == [payload(0), payload(1), payload(2)]
    assert applied(told.live(3)) == [3]
    assert told.stream.view().counts.garbled_count == 1
    assert told.stream.view().counts.clear_count == 0


def test_what_is_held_is_bounded_in_messages_and_bytes_and_what_was_dropped_is_asked_for() -> None:
    for limits in (StreamLimits(held_count=3), StreamLimits(held_bytes=3 * len(payload(0)))):
        told = Told(limits=limits)
        ask = asked(told.begin())
        for number in range(5, 15):
            told.live(number)
        view = told.stream.view()
        assert (view.held_count, view.counts.overflow_count) == (3, 7)
        assert view.held_bytes == 3 * len(payload(0))
        told.replay(ask, range(6))
        assert told.known == [payload(number) for number in range(8)]
        second = asked(told.live(15))
        told.replay(second, range(7, 16))
        assert told.known == [payload(number) for number in range(16)]


def test_after_a_reconnect_nothing_live_is_believed_before_the_life_is_verified() -> None:
    told = caught_up(5)
    assert told.cut() == []
    assert told.stream.trouble() is StreamTrouble.UNREACHABLE
    ask = asked(told.joined())
    assert ask.start == 4
    assert told.live(5, life=1) == [], "by chance the expected number, from another life"
    actions = told.replay(ask, [4], life=1, end=False)
    assert cleared(actions) == [ClearReason.RESTART]
    told.replay(asked(actions), range(6), life=1)
    assert told.known == [payload(number, 1) for number in range(6)]


def test_a_reconnect_to_the_same_life_keeps_everything() -> None:
    told = caught_up(5)
    told.cut()
    ask = asked(told.joined())
    assert told.live(7) == []
    told.replay(ask, range(4, 7))
    assert told.known == [payload(number) for number in range(8)]
    assert told.stream.view().counts.clear_count == 0
    assert told.stream.trouble() is None


def test_an_answer_to_a_question_from_before_the_cut_is_void() -> None:
    told = caught_up(5)
    old = asked(told.wait(6.0))
    told.cut()
    assert told.replay(old, [4]) == []
    assert told.stream.trouble() is StreamTrouble.UNREACHABLE


def test_a_cut_without_a_replay_socket_clears() -> None:
    told = Told(can_replay=False)
    told.begin()
    told.live(0)
    assert cleared(told.cut()) == [ClearReason.CUT]
    assert told.cut() == []
    told.joined()
    assert applied(told.live(4)) == [4]
    assert told.stream.trouble() is None


def test_an_unanswered_replay_is_asked_again_with_patience_then_the_live_stream_goes_on_alone() -> None:
    told = Told()
    told.begin()
    told.live(3)
    assert told.wait(3.1) == []
    assert told.stream.trouble() is StreamTrouble.CATCHING_UP
    asked(told.wait(1.1))
    actions = told.wait(3.1)
    assert actions[0] == Reconnect()
    assert applied(actions) == [3]
    assert told.stream.trouble() is StreamTrouble.UNREACHABLE
    assert applied(told.live(4)) == [4]
    actions = told.live(6)
    assert (cleared(actions), applied(actions)) == ([ClearReason.GAP], [6])
    ask = asked(told.wait(5.0))
    assert ask.history
    actions = told.replay(ask, range(8))
    assert cleared(actions) == [ClearReason.REBUILD]
    assert told.known == [payload(number) for number in range(8)]
    assert told.stream.view().complete
    assert told.stream.trouble() is None


def test_the_wait_between_unanswered_questions_is_bounded() -> None:
    told = caught_up(1)
    waits: list[float] = []
    asked_s = told.now_s
    for _ in range(600):
        if any(isinstance(action, AskReplay) for action in told.wait(0.5)):
            waits.append(told.now_s - asked_s)
            asked_s = told.now_s
    assert 15 <= max(waits) <= 20
    assert told.known == [payload(0)], "nothing contradicts it, so it stays"
    assert told.stream.trouble() is StreamTrouble.UNREACHABLE


def test_an_unreadable_message_clears_once_and_many_are_distrusted_until_one_can_be_read() -> None:  # R12
    stream = RankStream(can_replay=False)
    stream.joined(0.0)
    stream.live(0, payload(0), 0.0)
    assert stream.decoded(readable=True, lag_s=0.25) == []
    for number in range(1, 5):
        stream.live(number, b"\xc1", 0.0)
        assert stream.decoded(readable=False) == ([Clear(ClearReason.UNDECODABLE)] if number == 1 else [])
        assert stream.trouble() is None
    stream.live(5, b"\xc1", 0.0)
    stream.decoded(readable=False)
    assert stream.trouble() is StreamTrouble.UNDECODABLE
    view = stream.view()
    assert (view.counts.undecodable_count, view.complete, view.lag_s) == (5, False, 0.25)
    stream.live(6, payload(6), 0.0)
    stream.decoded(readable=True)
    assert stream.trouble() is None


def test_frames_that_are_no_messages_are_counted_and_distrusted() -> None:
    stream = RankStream(can_replay=False)
    stream.joined(0.0)
    for _ in range(5):
        stream.garbled()
    assert stream.trouble() is StreamTrouble.UNDECODABLE
    assert stream.view().counts.garbled_count == 5


def test_an_old_answer_is_ignored() -> None:
    told = Told()
    old = asked(told.begin())
    told.wait(3.1)
    new = asked(told.wait(1.1))
    assert told.replay(old, range(3)) == []
    assert applied(told.replay(new, range(2))) == [0, 1]


def test_two_messages_under_one_number_are_two_lives() -> None:
    told = caught_up(5)
    ask = asked(told.live(8))
    assert cleared(told.live(8, life=1)) == [ClearReason.RESTART]
    assert told.replay(ask, range(4, 9)) == []


def test_the_time_of_publishing_is_read_without_decoding() -> None:
    assert published_at_s(payload(3)) == 1_003.0
    assert published_at_s(msgpack.packb([7.5, []])) == 7.5
    for nonsense in (b"", b"\x93", b"\x93\xcb\x00", msgpack.packb({"ts": 1.0}), msgpack.packb([1, [], 0])):
        assert published_at_s(nonsense) is None
