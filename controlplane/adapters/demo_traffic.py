"""The demo's traffic: agents, chats and a batch, each a session that goes on where its last answer ended.

Owns: the sessions, their lengths, waits and texts (all from one seed), and the thread that drives them. Does not own:
a call (`demo_client`), or what is made of the results (`demo_report`).

Shapes are those of recorded agent sessions (TraceLab, reference workloads 6.3): 16,000 tokens of system prompt and
tools shared by all, a repository of a session's own, then steps that re-send everything and add the answer and a tool
result. Waits of minutes are drawn from the same laws and cut, so that a minute of demo shows many turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import uvloop

from controlplane.adapters.demo_client import Ask, ChatClient, Told
from controlplane.adapters.demo_stack import START_DEADLINE_S
from controlplane.adapters.demo_tenants import AGENT, BATCH, CHAT, Tenants

# Sessions at once: on two cores, four engines with these leave half of the machine idle (measured).
AGENT_SESSION_COUNT = 8
_CHAT_SESSION_COUNT = 5
_BATCH_STREAM_COUNT = 2
# Bytes of a token of the simulated engines.
_TOKEN_BYTES = 4
# Agents: the shared layer of a harness (12,000 of instructions, 4,000 of tools), then what a session adds.
_SYSTEM_TOKENS = 12_000
_TOOLS_TOKENS = 4_000
_TOOL_COUNT = 16
_CHAT_SYSTEM_TOKENS = 300
# Medians and sigmas of lognormal laws, in tokens (TraceLab fits), and the bounds that keep a minute's demo lively.
_REPOSITORY = (6_000, 0.45, 4_500, 24_000)
_TOOL_RESULT = (330, 1.62, 16, 6_000)
_USER_TURN = (120, 1.4, 16, 1_000)
_ANSWER = (160, 0.9, 16, 512)
_CHAT_ANSWER = (200, 0.6, 32, 512)
_BATCH_PROMPT = (1_500, 0.5, 300, 6_000)
# Waits in seconds: a tool (TraceLab's median is 0.33 s), a person between two turns (cut from minutes to seconds).
_TOOL_WAIT_S = (0.33, 1.2, 0.05, 2.0)
_THINK_S = (3.0, 0.5, 1.0, 8.0)
_START_GAP_S = 0.3
# One step in nine is started by a person (89 % of calls are the agent's own).
_PERSON_RATIO = 1 / 9
# A session that has grown beyond this ends, and another begins: half of what the smallest engine holds for one.
_MAX_SESSION_TOKENS = 60_000
_MAX_CHAT_TURNS = 8
# After the traffic's end, how long running answers may take.
_GRACE_S = 30.0
_WORD_COUNT = 2_048
# What the real engine's calls are counted under, whichever tenant makes them.
LLAMA_WORKLOAD = "llama.cpp"
# The real engine's conversation: a CPU does tens of tokens a second, so it is short.
_LLAMA_QUESTIONS = ("Name three uses of a control plane.", "Which is the most important?", "Why?", "In one word?")
_LLAMA_ANSWER_TOKENS = 24
_LLAMA_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """What to drive, where, and for how long."""

    host: str
    port: int
    tenants: Tenants
    sim_model: str
    llama_model: str | None
    duration_s: float
    speed: float
    seed: int


@dataclass(slots=True)
class Tally:
    """Mutable: what has happened so far. Written by the traffic's thread, read by any."""

    sent_count: int = 0
    completed_count: int = 0
    calls: list[Told] = field(default_factory=list)
    ready_unix_s: float | None = None
    first_token_unix_s: float | None = None
    first_token_tenant: str = ""
    began_s: float | None = None
    """Of `time.monotonic`."""
    fault: str | None = None


class Traffic:
    """The driver in a thread of its own: `start`, `done`, `stop`. Mutable."""

    def __init__(self, plan: TrafficPlan) -> None:
        self.tally = Tally()
        self._plan = plan
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)

    def start(self) -> None:
        """Begin as soon as the gateway is ready."""
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether everything was sent and answered."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Give everything up at once, and wait for the thread."""
        self._cancelled = True
        loop, main = self._loop, self._main
        if loop is not None and main is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(main.cancel)
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(self._drive())
        except asyncio.CancelledError:
            pass
        except Exception as fault:  # a defect of the demo: told by the main thread, not lost in this one
            self.tally.fault = f"The demo's traffic broke: {type(fault).__name__}: {fault}"

    async def _drive(self) -> None:
        self._main = asyncio.current_task()
        if self._cancelled:
            return
        client = ChatClient(self._plan.host, self._plan.port)
        try:
            until_s = time.monotonic() + START_DEADLINE_S
            while (blocker := await client.blocker()) is not None:
                if time.monotonic() > until_s:
                    self.tally.fault = f"The gateway was not ready within {START_DEADLINE_S:g} s: {blocker}."
                    return
                await asyncio.sleep(0.03)
            self.tally.ready_unix_s, self.tally.began_s = time.time(), time.monotonic()
            await _Sessions(self._plan, client, self.tally).run()
        finally:
            await client.aclose()


class _Sessions:
    """Everything that runs at once. Mutable."""

    def __init__(self, plan: TrafficPlan, client: ChatClient, tally: Tally) -> None:
        self._plan = plan
        self._client = client
        self._tally = tally
        self._over = asyncio.Event()
        dice = _dice(f"{plan.seed}")
        self._words = [_word(dice) for _ in range(_WORD_COUNT)]
        self._system = {"role": "system", "content": self._text(dice, _SYSTEM_TOKENS)}
        self._tools = [self._tool(dice, number) for number in range(_TOOL_COUNT)]

    async def run(self) -> None:
        """Drive every session until the time is over, then let running answers end."""
        # A short chat first: it is what shows the first token soonest.
        gap_s = self._plan.duration_s / (2 * _CHAT_SESSION_COUNT)
        sessions = [self._repeat(self._chat, n, gap_s * n) for n in range(_CHAT_SESSION_COUNT)]
        sessions += [self._repeat(self._agent, n, _START_GAP_S * n) for n in range(AGENT_SESSION_COUNT)]
        sessions += [self._repeat(self._batch, n, 0.5) for n in range(_BATCH_STREAM_COUNT)]
        if self._plan.llama_model is not None:
            sessions.append(self._llama(self._plan.llama_model))
        tasks = [asyncio.create_task(session) for session in sessions]
        try:
            await self._first_of(tasks)
            self._over.set()
            _, late = await asyncio.wait(tasks, timeout=_GRACE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=bool(late))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _first_of(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until the time is over. A session that breaks ends it."""
        waiting = [task for task in tasks if not task.done()]
        finished, _ = await asyncio.wait(
            waiting, timeout=self._plan.duration_s, return_when=asyncio.FIRST_EXCEPTION
        )  # the llama's session ends early; the others never do
        for task in finished:
            task.result()

    async def _repeat(
        self, session: Callable[[random.Random, str], Coroutine[Any, Any, None]], number: int, delay_s: float
    ) -> None:
        """One session after the other."""
        await self._pause(delay_s)
        life = 0
        while not self._over.is_set():
            name = f"{session.__name__.strip('_')}-{number}-{life}"
            await session(_dice(f"{self._plan.seed}/{name}"), name)
            life += 1

    async def _agent(self, dice: random.Random, name: str) -> None:
        repository = self._text(dice, _draw_count(dice, _REPOSITORY))
        task = self._text(dice, _draw_count(dice, _USER_TURN))
        messages = [self._system, {"role": "user", "content": f"{repository}\n\n{task}"}]
        while not self._over.is_set():
            told = await self._call(AGENT, name, messages, _draw_count(dice, _ANSWER), tools=True)
            if not told.completed:
                await self._pause(told.retry_after_s)
                continue
            messages.append({"role": "assistant", "content": told.text})
            if (told.prompt_tokens or 0) > _MAX_SESSION_TOKENS:
                return
            if dice.random() < _PERSON_RATIO:
                await self._pause(_draw(dice, _THINK_S))
                content = self._text(dice, _draw_count(dice, _USER_TURN))
            else:
                await self._pause(_draw(dice, _TOOL_WAIT_S))
                content = "Tool result: " + self._text(dice, _draw_count(dice, _TOOL_RESULT))
            messages.append({"role": "user", "content": content})

    async def _chat(self, dice: random.Random, name: str) -> None:
        messages = [{"role": "system", "content": self._text(_dice(f"{self._plan.seed}"), _CHAT_SYSTEM_TOKENS)}]
        for _ in range(_MAX_CHAT_TURNS):
            messages.append({"role": "user", "content": self._text(dice, _draw_count(dice, _USER_TURN))})
            told = await self._call(CHAT, name, messages, _draw_count(dice, _CHAT_ANSWER))
            while not told.completed and not self._over.is_set():
                await self._pause(told.retry_after_s)
                told = await self._call(CHAT, name, messages, _draw_count(dice, _CHAT_ANSWER))
            messages.append({"role": "assistant", "content": told.text})
            await self._pause(_draw(dice, _THINK_S))
            if self._over.is_set():
                return

    async def _batch(self, dice: random.Random, name: str) -> None:
        prompt = "Classify: " + self._text(dice, _draw_count(dice, _BATCH_PROMPT))
        messages = [{"role": "user", "content": prompt}]
        told = await self._call(BATCH, name, messages, _draw_count(dice, _ANSWER), stream=False)
        await self._pause(told.retry_after_s if not told.completed else 0.0)

    async def _llama(self, model: str) -> None:
        """A few short turns on the real engine: a CPU does tens of tokens a second."""
        secret = self._plan.tenants.by_name[CHAT].secret
        while not await self._client.has_model(model, secret):  # it loads its weights
            if self._over.is_set():
                return
            await self._pause(_LLAMA_POLL_S * self._plan.speed)
        messages: list[dict[str, Any]] = []
        for question in _LLAMA_QUESTIONS:
            messages.append({"role": "user", "content": question})
            told = await self._call(CHAT, "llama", messages, _LLAMA_ANSWER_TOKENS, model=model)
            if not told.completed:
                return
            messages.append({"role": "assistant", "content": told.text})

    async def _call(
        self,
        tenant: str,
        user: str,
        messages: list[dict[str, Any]],
        max_tokens: int,
        *,
        tools: bool = False,
        stream: bool = True,
        model: str | None = None,
    ) -> Told:
        tally = self._tally
        tally.sent_count += 1
        ask = Ask(
            workload=tenant if model is None else LLAMA_WORKLOAD,
            secret=self._plan.tenants.by_name[tenant].secret,
            model=model or self._plan.sim_model,
            messages=messages,
            max_tokens=max_tokens,
            tools=self._tools if tools else (),
            stream=stream,
            user=user,
        )
        told = await self._client.chat(ask)
        tally.calls.append(replace(told, text=""))  # nothing that is measured needs the words
        tally.completed_count += told.completed
        if told.first_token_unix_s is not None:
            known = tally.first_token_unix_s
            if known is None or told.first_token_unix_s < known:
                tally.first_token_unix_s, tally.first_token_tenant = told.first_token_unix_s, tenant
        return told

    async def _pause(self, seconds: float) -> None:
        """Sleep in the model's time; the end of the traffic wakes it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds / self._plan.speed)

    def _text(self, dice: random.Random, tokens: int) -> str:
        """Words of about this many tokens of the simulated tokenizer."""
        size = tokens * _TOKEN_BYTES
        # Words have 6.5 letters and a blank on average; a tenth more than needed, then cut.
        return " ".join(dice.choices(self._words, k=size // 7 + 16))[:size]

    def _tool(self, dice: random.Random, number: int) -> dict[str, Any]:
        about = self._text(dice, _TOOLS_TOKENS // _TOOL_COUNT - 60)
        schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
        function = {"name": f"tool_{number}", "description": about, "parameters": schema}
        return {"type": "function", "function": function}


def _dice(seed: str) -> random.Random:
    return random.Random(seed)  # noqa: S311 - it makes texts and waits, the same for the same seed


def _word(dice: random.Random) -> str:
    return "".join(dice.choices("etaoinshrdlucmfwypvbgk", k=dice.randint(4, 9)))


def _draw(dice: random.Random, law: tuple[float, float, float, float]) -> float:
    """A lognormal by median and sigma, within bounds."""
    median, sigma, low, high = law
    return min(high, max(low, median * math.exp(dice.gauss(0.0, sigma))))


def _draw_count(dice: random.Random, law: tuple[float, float, float, float]) -> int:
    return round(_draw(dice, law))
